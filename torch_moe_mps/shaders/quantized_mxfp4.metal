#include "quantized.h"

#define MXFP4(T, suffix)                        \
  typedef Mxfp4Weights<T, 4> Decode_##T;        \
  typedef Mxfp4Weights<T, 2> Gemm_##T;          \
  FORMAT("mxfp4_" suffix, Decode_##T, Gemm_##T) \
  FEW("mxfp4_" suffix, Decode_##T)

MXFP4(float, "f32")
MXFP4(half, "f16")
MXFP4(bfloat, "bf16")
