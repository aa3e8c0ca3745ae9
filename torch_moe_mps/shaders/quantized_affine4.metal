#include "quantized.h"

// A lane of the matrix kernels takes 32 bytes of a row in a step: in pieces of 16 they took 94 instead of 89
// us on an NVIDIA H200 (gate + up, 32 tokens). For float gate + up, whose inputs take more registers, it
// is 16.
#define AFFINE(T, suffix)                                        \
  typedef AffineWeights<T, 4, 4> Single_##T;                     \
  typedef AffineWeights<T, 4, 8> Pair_##T;                       \
  typedef AffineWeights<T, 4, 4> SmallPair_##T;                  \
  typedef AffineWeights<T, 4, 2> Gemm_##T;                       \
  typedef AffineStrips<T, 4, false, 4 / sizeof(T)> Rows_##T;     \
  typedef AffineStrips<T, 4, false, 2> Down_##T;                 \
  typedef AffineStrips<T, 4, true, 4 / sizeof(T)> SmallRows_##T; \
  typedef AffineStrips<T, 4, true, 2> SmallDown_##T;             \
  FORMAT("affine4_" suffix, Single_##T, Gemm_##T)                \
  MATRIX("affine4_" suffix, Pair_##T, Rows_##T, Down_##T)        \
  MATRIX("affine4_groups32_" suffix, SmallPair_##T, SmallRows_##T, SmallDown_##T)

AFFINE(float, "f32")
AFFINE(half, "f16")
AFFINE(bfloat, "bf16")
