// Selection by counting: numbers in the order of floats, and sums over the threads in front of one.
#pragma once
#include "common.h"

// Numbers whose order is that of the scores.
inline uint in_order(float score) {
  const uint bits = as_type<uint>(score);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// The sum of the threads' values in front of this one, and of all. `partials` must not be in use.
struct Sums {
  uint before;
  uint all;
};
inline Sums sums_of_threads(uint value, threadgroup uint* partials, uint lane, uint simdgroup) {
  const uint before = simd_prefix_exclusive_sum(value);
  const uint total = simd_sum(value);
  if (lane == 0) partials[simdgroup] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint partial = partials[lane];
  return {before + simd_sum(lane < simdgroup ? partial : 0), simd_sum(partial)};
}
