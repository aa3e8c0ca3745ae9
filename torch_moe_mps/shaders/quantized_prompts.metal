// The kernels of prompts for weights in the format MOE_WEIGHTS.
#include "matmul/prompts.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE_PROMPTS()
INSTANTIATE("gemm16_split", gemm<Weights, kSplitTilePairs / 8, true>)
