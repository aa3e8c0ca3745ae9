#include "norms.h"

#define INSTANTIATE(T, suffix)                                \
  INSTANTIATE_KERNEL("norm_add_" suffix, norm_rows<T, false>) \
  INSTANTIATE_KERNEL("residual_norm_" suffix, norm_rows<T, true>)

INSTANTIATE(float, "f32")
INSTANTIATE(half, "f16")
INSTANTIATE(bfloat, "bf16")
