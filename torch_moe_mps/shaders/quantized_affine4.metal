#include "quantized.h"

#define AFFINE(T, suffix)                              \
  typedef AffineWeights<T, 4, 4> Single_##T;           \
  typedef AffineWeights<T, 4, 4, true> Few_##T;        \
  typedef AffineWeights<T, 4, 2> Gemm_##T;             \
  typedef AffineFragments<T, 4, false> Fragments_##T;  \
  typedef AffineFragments<T, 4, true> SmallGroups_##T; \
  FORMAT("affine4_" suffix, Single_##T, Gemm_##T)      \
  MATRIX("affine4_" suffix, Few_##T, Fragments_##T)    \
  MATRIX("affine4_groups32_" suffix, Few_##T, SmallGroups_##T)

AFFINE(float, "f32")
AFFINE(half, "f16")
AFFINE(bfloat, "bf16")
