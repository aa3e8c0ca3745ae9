// Sigmoid and what is like it.
#pragma once
#include "common.h"

inline float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}
inline float4 sigmoid(float4 x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

template <typename V>
inline V silu(V x) {
  return x * sigmoid(x);
}

// log(1 + exp(x)) without overflow, and without log1p, which Metal lacks: y - (u - 1) is what the rounding of
// u = 1 + y lost. A part of log1p(y) up to 2^-24 / u of it is wrong for the missing division by u.
inline float softplus(float x) {
  const float y = precise::exp(-fabs(x)), u = 1.0f + y;
  return max(x, 0.0f) + (precise::log(u) + (y - (u - 1.0f)));
}
