// Questions of `torch-moe-mps check --probe` to a GPU: how it computes, and how fast. No model runs them, and
// MOE_DTYPE is float.
#include "common.h"
#include "params/probe.h"

constant constexpr uint kProbeChains = 8;        // products of a thread that do not wait for each other

// The two elements of an 8 x 8 matrix that each lane holds.
[[kernel]] void probe_layout_f32(device const float* matrix [[buffer(0)]],
                                 device float* elements [[buffer(1)]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> held;
  simdgroup_load(held, matrix, 8);
  elements[2 * lane] = held.thread_elements()[0];
  elements[2 * lane + 1] = held.thread_elements()[1];
}

// Results of operations on x[0], a NaN, and x[1], a number.
[[kernel]] void probe_nan_f32(device const float* x [[buffer(0)]], device uint* out [[buffer(1)]],
                              uint lane [[thread_index_in_simdgroup]]) {
  const float nan = x[0], number = x[1];
  const float most = simd_max(lane == 5 ? nan : number), least = simd_min(lane == 5 ? nan : number);
  if (lane > 0) return;
  out[0] = isnan(nan) ? 1 : 0;
  out[1] = nan > number || nan < number || nan == number ? 1 : 0;
  out[2] = uint(nan);
  out[3] = uint(int(nan));
  out[4] = as_type<uint>(max(nan, number));
  out[5] = as_type<uint>(max(number, nan));
  out[6] = as_type<uint>(clamp(nan, 0.0f, number));
  out[7] = as_type<uint>(most);
  out[8] = as_type<uint>(least);
}

// x * scale in single and in half precision.
[[kernel]] void probe_subnormals_f32(device const float* x [[buffer(0)]],
                                     device const float* scales [[buffer(1)]],
                                     device float* single [[buffer(2)]], device half* halves [[buffer(3)]],
                                     uint i [[thread_position_in_grid]]) {
  single[i] = x[i] * scales[i];
  halves[i] = half(x[i]) * half(scales[i]);
}

[[kernel]] void probe_bfloat_f32(device const float* x [[buffer(0)]], device bfloat* out [[buffer(1)]],
                                 uint i [[thread_position_in_grid]]) {
  out[i] = bfloat(x[i]);
}

// Next to nothing, which has to wait for the dispatch in front of it.
[[kernel]] void probe_empty_f32(device uint* counter [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 0) counter[0] += 1;
}

// Reads `steps` times four vectors a thread, all threads side by side.
[[kernel]] void probe_read_f32(device const float4* data [[buffer(0)]], device float* out [[buffer(1)]],
                               constant ProbeParams& params [[buffer(2)]], uint i [[thread_position_in_grid]],
                               uint threads [[threads_per_grid]]) {
  float4 sums[4] = {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)};
  device const float4* from = data + i;
  for (uint step = 0; step < params.steps; ++step) {
    UNROLL for (uint n = 0; n < 4; ++n) sums[n] += from[n * threads];
    from += 4 * threads;
  }
  const float4 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  out[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The same of a piece for each threadgroup, which begins at vector starts[group].
[[kernel]] void probe_read_pieces_f32(device const float4* data [[buffer(0)]],
                                      device const uint* starts [[buffer(1)]],
                                      device float* out [[buffer(2)]],
                                      constant ProbeParams& params [[buffer(3)]],
                                      uint group [[threadgroup_position_in_grid]],
                                      uint t [[thread_index_in_threadgroup]],
                                      uint threads [[threads_per_threadgroup]]) {
  float4 sums[4] = {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)};
  device const float4* from = data + starts[group] + t;
  for (uint step = 0; step < params.steps; ++step) {
    UNROLL for (uint n = 0; n < 4; ++n) sums[n] += from[n * threads];
    from += 4 * threads;
  }
  const float4 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  out[group * threads + t] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

[[kernel]] void probe_fma_f32(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                              constant ProbeParams& params [[buffer(2)]],
                              uint i [[thread_position_in_grid]]) {
  float sums[kProbeChains];
  UNROLL for (uint n = 0; n < kProbeChains; ++n) sums[n] = float(n);
  const float a = x[0], b = x[1];
  for (uint step = 0; step < params.steps; ++step) {
    UNROLL for (uint turn = 0; turn < 8; ++turn) {
      UNROLL for (uint n = 0; n < kProbeChains; ++n) sums[n] = fma(sums[n], a, b);
    }
  }
  float sum = 0.0f;
  UNROLL for (uint n = 0; n < kProbeChains; ++n) sum += sums[n];
  out[i] = sum;
}

// Products of 8 x 8 matrices of T, added up in float.
template <typename T>
[[kernel]] void probe_matrix(device const T* x [[buffer(0)]], device float* out [[buffer(1)]],
                             constant ProbeParams& params [[buffer(2)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint simdgroups [[simdgroups_per_threadgroup]]) {
  simdgroup_matrix<T, 8, 8> a, b;
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x + 64, 8);
  simdgroup_matrix<float, 8, 8> sums[kProbeChains];
  UNROLL for (uint n = 0; n < kProbeChains; ++n) sums[n] = simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint step = 0; step < params.steps; ++step) {
    UNROLL for (uint n = 0; n < kProbeChains; ++n) simdgroup_multiply_accumulate(sums[n], a, b, sums[n]);
  }
  device float* own = out + ulong(group * simdgroups + simdgroup) * kProbeChains * 64;
  UNROLL for (uint n = 0; n < kProbeChains; ++n) simdgroup_store(sums[n], own + n * 64, 8);
}
INSTANTIATE("probe_matrix_half", probe_matrix<half>)
INSTANTIATE("probe_matrix_float", probe_matrix<float>)
