#include "matmul/combine.h"

INSTANTIATE("expert_combine", expert_combine<MOE_DTYPE>)
