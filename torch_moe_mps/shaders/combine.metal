#include "combine.h"
#include "expert_combine.h"

#define INSTANTIATE(T, suffix)                                               \
  INSTANTIATE_KERNEL("silu_mul_stacked_" suffix, silu_mul_stacked<T>)        \
  INSTANTIATE_KERNEL("weighted_sum_" suffix, weighted_sum_rows<T>)           \
  INSTANTIATE_KERNEL("weighted_sum_norm_" suffix, weighted_sum_norm_rows<T>) \
  INSTANTIATE_KERNEL("expert_combine_" suffix, expert_combine<T>)

INSTANTIATE(float, "f32")
INSTANTIATE(half, "f16")
INSTANTIATE(bfloat, "bf16")
