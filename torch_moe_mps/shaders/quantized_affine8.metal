#include "quantized.h"

#define AFFINE(T, suffix)                              \
  typedef AffineWeights<T, 8, 2> Single_##T;           \
  typedef AffineWeights<T, 8, 2, true> Few_##T;        \
  typedef AffineWeights<T, 8, 2> Gemm_##T;             \
  typedef AffineFragments<T, 8, false> Fragments_##T;  \
  typedef AffineFragments<T, 8, true> SmallGroups_##T; \
  FORMAT("affine8_" suffix, Single_##T, Gemm_##T)      \
  MATRIX("affine8_" suffix, Few_##T, Fragments_##T)    \
  MATRIX("affine8_groups32_" suffix, Few_##T, SmallGroups_##T)

AFFINE(float, "f32")
AFFINE(half, "f16")
AFFINE(bfloat, "bf16")
