// The experts' kernels for dense weights, also for those with the input dimension first.
#include "experts/columns.h"
#include "experts/kernels.h"

INSTANTIATE_EXPERTS(Dense<MOE_DTYPE>)
INSTANTIATE("expert_columns", expert_columns<MOE_DTYPE>)
INSTANTIATE("expert_down_columns", expert_down_columns<MOE_DTYPE>)
INSTANTIATE("expert_gemm8_transposed", expert_gemm<DenseColumns<MOE_DTYPE>, 1>)
INSTANTIATE("expert_gemm32_transposed", expert_gemm<DenseColumns<MOE_DTYPE>, kTilePairs / 8>)
