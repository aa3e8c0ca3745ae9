#include "norms.h"

#define INSTANTIATE(T, suffix)                                                                            \
  template [[host_name("norm_add_" suffix)]] [[kernel]] decltype(norm_rows<T, false>) norm_rows<T, false>; \
  template [[host_name("residual_norm_" suffix)]] [[kernel]] decltype(norm_rows<T, true>) norm_rows<T, true>;

INSTANTIATE(float, "f32")
INSTANTIATE(half, "f16")
INSTANTIATE(bfloat, "bf16")
