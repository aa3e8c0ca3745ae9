// The experts' kernels for dense weights.
#include "matmul/formats/dense.h"
#include "matmul/heads.h"
#include "matmul/kernels.h"
#include "matmul/outer.h"
#include "matmul/transposed.h"

INSTANTIATE_MATMULS(Dense<MOE_DTYPE>)
INSTANTIATE_HEADS()
INSTANTIATE("gemm_transposed", gemm_transposed<Dense<MOE_DTYPE>>)
INSTANTIATE("expert_outer", expert_outer<MOE_DTYPE>)
