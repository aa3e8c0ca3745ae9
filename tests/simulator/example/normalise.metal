#include <metal_stdlib>
using namespace metal;

// Each row divided by its sum.
kernel void normalise(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                      constant uint& width [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                      uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[4];
  const float sum = simd_sum(i < width ? in[row * width + i] : 0.0f);
  if (lane == 0) sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < width) out[row * width + i] = in[row * width + i] / (sums[0] + sums[1] + sums[2] + sums[3]);
}
