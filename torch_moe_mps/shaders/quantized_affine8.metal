#include "quantized.h"

// See quantized_affine4.metal.
#define AFFINE(T, suffix)                                        \
  typedef AffineWeights<T, 8, 2> Single_##T;                     \
  typedef AffineWeights<T, 8, 4> Pair_##T;                       \
  typedef AffineWeights<T, 8, 2> Gemm_##T;                       \
  typedef AffineStrips<T, 8, false, 4 / sizeof(T)> Rows_##T;     \
  typedef AffineStrips<T, 8, false, 2> Down_##T;                 \
  typedef AffineStrips<T, 8, true, 4 / sizeof(T)> SmallRows_##T; \
  typedef AffineStrips<T, 8, true, 2> SmallDown_##T;             \
  FORMAT("affine8_" suffix, Single_##T, Gemm_##T)                \
  MATRIX("affine8_" suffix, Pair_##T, Rows_##T, Down_##T)        \
  MATRIX("affine8_groups32_" suffix, Pair_##T, SmallRows_##T, SmallDown_##T)

AFFINE(float, "f32")
AFFINE(half, "f16")
AFFINE(bfloat, "bf16")
