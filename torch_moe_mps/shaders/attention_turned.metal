#include "attention/turned.h"

INSTANTIATE("attention_turned8_64", attention_turned<MOE_DTYPE, 4, 1, 8, 1>)
INSTANTIATE("attention_turned8_128", attention_turned<MOE_DTYPE, 2, 2, 8, 1>)
INSTANTIATE("attention_turned8_256", attention_turned<MOE_DTYPE, 1, 4, 8, 1>)
INSTANTIATE("attention_turned8_512", attention_turned<MOE_DTYPE, 1, 8, 8, 1>)
INSTANTIATE("attention_turned16_64", attention_turned<MOE_DTYPE, 2, 2, 4, 2>)
INSTANTIATE("attention_turned16_128", attention_turned<MOE_DTYPE, 1, 4, 4, 2>)
INSTANTIATE("attention_turned16_256", attention_turned<MOE_DTYPE, 1, 8, 4, 2>)
