#include "quantized.h"

// Down takes more of a row at a time: it has no inputs of other simdgroups to wait for, and more to load
// ahead is faster. 34 instead of 39 us on an NVIDIA H200 (8 tokens).
#define AFFINE(T, suffix)                                \
  typedef AffineWeights<T, 8, 2> Single_##T;             \
  typedef AffineWeights<T, 8, 2, true> Few_##T;          \
  typedef AffineWeights<T, 8, 2> Gemm_##T;               \
  typedef AffineFragments<T, 8, false, 4> Rows_##T;      \
  typedef AffineFragments<T, 8, false, 8> Down_##T;      \
  typedef AffineFragments<T, 8, true, 4> SmallRows_##T;  \
  typedef AffineFragments<T, 8, true, 8> SmallDown_##T;  \
  FORMAT("affine8_" suffix, Single_##T, Gemm_##T)        \
  MATRIX("affine8_" suffix, Few_##T, Rows_##T, Down_##T) \
  MATRIX("affine8_groups32_" suffix, Few_##T, SmallRows_##T, SmallDown_##T)

AFFINE(float, "f32")
AFFINE(half, "f16")
AFFINE(bfloat, "bf16")
