#include "combine.h"

#define INSTANTIATE(T, suffix)                                                                                           \
  template [[host_name("silu_mul_stacked_" suffix)]] [[kernel]] decltype(silu_mul_stacked<T>) silu_mul_stacked<T>;       \
  template [[host_name("weighted_sum_" suffix)]] [[kernel]] decltype(weighted_sum_rows<T>) weighted_sum_rows<T>;         \
  template [[host_name("weighted_sum_norm_" suffix)]] [[kernel]] decltype(weighted_sum_norm_rows<T>) weighted_sum_norm_rows<T>;

INSTANTIATE(float, "f32")
INSTANTIATE(half, "f16")
INSTANTIATE(bfloat, "bf16")
