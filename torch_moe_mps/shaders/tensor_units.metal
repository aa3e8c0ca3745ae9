// Matmuls on tensor units for weights of the type MOE_WEIGHTS, dense ones too: a library of its own, because
// it needs Metal 4.0 and is compiled only for the GPUs that have the units.
#include "matmul/tensor_units.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE("gemm32_tensor", tensor_gemm<Weights, kTilePairs>)
INSTANTIATE("gemm64_tensor", tensor_gemm<Weights, kLargeTilePairs>)
