// The experts' kernels for dense weights.
#include "matmul/formats/dense.h"
#include "matmul/heads.h"
#include "matmul/kernels.h"
#include "matmul/outer.h"
#include "matmul/prompts.h"

INSTANTIATE_MATMULS(Dense<MOE_DTYPE>)
INSTANTIATE_PROMPTS()
INSTANTIATE_HEADS()
INSTANTIATE("expert_outer", expert_outer<MOE_DTYPE>)
