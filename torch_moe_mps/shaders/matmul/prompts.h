// The kernels of many tokens' matmuls, and of gradients, to be instantiated for a format of weights.
#pragma once
#include "matmul/combine.h"
#include "matmul/gemm.h"
#include "matmul/transposed.h"

#define INSTANTIATE_PROMPTS()                                 \
  INSTANTIATE("expert_combine", expert_combine<MOE_DTYPE>)    \
  INSTANTIATE("gemm32", gemm<Weights, kTilePairs / 8, false>) \
  INSTANTIATE("gemm_transposed", gemm_transposed<Weights>)
