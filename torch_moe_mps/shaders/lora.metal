#include "lora.h"

INSTANTIATE("lora", lora<MOE_DTYPE>)
INSTANTIATE("lora_backward", lora_backward<MOE_DTYPE>)
INSTANTIATE("lora_outer", lora_outer<MOE_DTYPE>)
