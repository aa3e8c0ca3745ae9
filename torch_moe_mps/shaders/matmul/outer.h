// Sums of outer products, for each expert those of its pairs: the gradient of a stack of matrices.
#pragma once
#include "common.h"
#include "geometry/matmul.h"
#include "params/matmul.h"

// A thread has one element, and takes the expert's pairs in ascending order. Grid: (slices of kOuterThreads
// elements, experts).
template <typename T>
[[kernel]] void expert_outer(device const T* left [[buffer(0)]], device const T* right [[buffer(1)]],
                             device const int* pair_order [[buffer(2)]],
                             device const int* offsets [[buffer(3)]], device float* out [[buffer(4)]],
                             constant OuterParams& params [[buffer(5)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong size = ulong(params.left) * params.right;
  const ulong element = ulong(group.x) * kOuterThreads + thread_index;
  if (element >= size) return;
  const uint row = uint(element / params.right), column = uint(element % params.right);
  float sum = 0.0f;
  for (int i = offsets[group.y]; i < offsets[group.y + 1]; ++i) {
    const uint pair = uint(pair_order[i]);
    const uint source = params.right_per_pair != 0 ? pair : pair / params.slots;
    const float a = float(left[ulong(pair) * params.left + row]);
    sum = fma(a, float(right[ulong(source) * params.right + column]), sum);
  }
  out[group.y * size + element] = sum;
}
