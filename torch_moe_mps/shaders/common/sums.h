// Sums over the elements of vectors, and over a threadgroup.
#pragma once
#include "common.h"

inline float sum_of(float x) {
  return x;
}
inline float sum_of(float4 x) {
  return (x.x + x.y) + (x.z + x.w);
}
inline float sum_of_squares(float x) {
  return x * x;
}
inline float sum_of_squares(float4 x) {
  return x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
}

// sum + a * b, summed one element after the other.
inline float add_dot(float sum, float a, float b) {
  return fma(a, b, sum);
}
inline float add_dot(float sum, float4 a, float4 b) {
  UNROLL for (int i = 0; i < 4; ++i) sum = fma(a[i], b[i], sum);
  return sum;
}

// The sum of `value` over the threadgroup, in every thread. `partials` must not be in use by an earlier
// reduction.
inline float threadgroup_sum(float value, threadgroup float* partials, uint lane, uint simdgroup,
                             uint simdgroups) {
  const float sum = simd_sum(value);
  if (lane == 0) partials[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? partials[lane] : 0.0f);
}
