// The experts' kernels for dense weights, also for those with the input dimension first.
#include "matmul/columns.h"
#include "matmul/heads.h"
#include "matmul/kernels.h"

INSTANTIATE_MATMULS(Dense<MOE_DTYPE>)
INSTANTIATE("matmul_columns", matmul_columns<MOE_DTYPE>)
INSTANTIATE("expert_down_columns", expert_down_columns<MOE_DTYPE>)
INSTANTIATE("gemm8_transposed", gemm<DenseColumns<MOE_DTYPE>, 1, false>)
INSTANTIATE("gemm32_transposed", gemm<DenseColumns<MOE_DTYPE>, kTilePairs / 8, false>)
INSTANTIATE_HEADS()
