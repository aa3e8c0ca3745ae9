// Questions of `torch-moe-mps check --probe` to a GPU: how it computes, and how fast. No model runs them, and
// MOE_DTYPE is float.
#include "common.h"
#include "params/probe.h"

constant constexpr uint kProbeChains = 8;        // products of a thread that do not wait for each other
constant constexpr uint kProbeMostStride = 33;   // floats between lanes
constant constexpr uint kProbeOwnMemory = 5120;  // numbers of 4 bytes: 20 of 32 KiB

// The two elements of an 8 x 8 matrix that each lane holds.
[[kernel]] void probe_layout_f32(device const float* matrix [[buffer(0)]],
                                 device float* elements [[buffer(1)]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> held;
  simdgroup_load(held, matrix, 8);
  elements[2 * lane] = held.thread_elements()[0];
  elements[2 * lane + 1] = held.thread_elements()[1];
}

// a * b + c in one statement, and in two: rounded twice, or once where the compiler contracts it.
[[kernel]] void probe_contraction_f32(device const float* a [[buffer(0)]],
                                      device const float* b [[buffer(1)]],
                                      device const float* c [[buffer(2)]], device float* out [[buffer(3)]],
                                      uint i [[thread_position_in_grid]]) {
  out[2 * i] = a[i] * b[i] + c[i];
  const float product = a[i] * b[i];
  out[2 * i + 1] = product + c[i];
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

// Threadgroup memory that the encoder gives, turned round in a simdgroup.
[[kernel]] void probe_given_memory_f32(device uint* out [[buffer(0)]],
                                       threadgroup uint* memory [[threadgroup(0)]],
                                       uint lane [[thread_index_in_simdgroup]]) {
  memory[lane] = lane;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = memory[31 - lane];
}

// Takes so much memory of its own that too little is left for what the kernel before was given.
[[kernel]] void probe_own_memory_f32(device uint* out [[buffer(0)]],
                                     uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint memory[kProbeOwnMemory];
  for (uint i = lane; i < kProbeOwnMemory; i += 32) memory[i] = i;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = 0;
  for (uint i = 0; i < kProbeOwnMemory; i += 32) sum += memory[i + 31 - lane];
  out[lane] = sum;
}

// The grid of the next dispatch, and how many threadgroups that has run.
[[kernel]] void probe_grid_f32(device uint* grid [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i < 3) grid[i] = 3 - i;
}
[[kernel]] void probe_count_f32(device uint* counter [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0)
    atomic_fetch_add_explicit(reinterpret_cast<device atomic_uint*>(counter), 1u, memory_order_relaxed);
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

// kLive numbers that a thread needs all the time.
template <uint kLive>
[[kernel]] void probe_live(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                           constant ProbeParams& params [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float values[kLive];
  UNROLL for (uint n = 0; n < kLive; ++n) values[n] = x[n % 2] + float(n);
  const float a = x[0];
  for (uint step = 0; step < params.steps; ++step) {
    UNROLL for (uint n = 0; n < kLive; ++n) values[n] = fma(values[n], a, values[(n + 1) % kLive]);
  }
  float sum = 0.0f;
  UNROLL for (uint n = 0; n < kLive; ++n) sum += values[n];
  out[i] = sum;
}
INSTANTIATE("probe_live64", probe_live<64>)
INSTANTIATE("probe_live80", probe_live<80>)
INSTANTIATE("probe_live88", probe_live<88>)
INSTANTIATE("probe_live96", probe_live<96>)
INSTANTIATE("probe_live104", probe_live<104>)
INSTANTIATE("probe_live112", probe_live<112>)
INSTANTIATE("probe_live120", probe_live<120>)
INSTANTIATE("probe_live128", probe_live<128>)

// Reads threadgroup memory eight times a step, with so many floats between neighbouring lanes.
constant constexpr uint kProbeFloats = 31 * kProbeMostStride + 24;
[[kernel]] void probe_banks_f32(device const uint* stride [[buffer(0)]], device float* out [[buffer(1)]],
                                constant ProbeParams& params [[buffer(2)]],
                                uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                                uint threads [[threads_per_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float memory[kProbeFloats];
  for (uint n = t; n < kProbeFloats; n += threads) memory[n] = float(n);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup const float* own = memory + lane * stride[0];
  float sums[8] = {0.0f};
  for (uint step = 0; step < params.steps; ++step) {
    UNROLL for (uint n = 0; n < 8; ++n) sums[n] += own[n + step % 16];
  }
  float sum = 0.0f;
  UNROLL for (uint n = 0; n < 8; ++n) sum += sums[n];
  out[i] = sum;
}

// 32 rows of weights times the matrix 1, in each simdgroup: by fragments that each simdgroup reads from
// memory, or that the threadgroup reads once and stages. Of 16 tiles of rows, which caches hold.
constant constexpr uint kProbeRows = 32, kProbeDepth = 32, kProbePitch = kProbeDepth + 8, kProbeTiles = 16;
template <bool kStaged>
[[kernel]] void probe_fragments(device const half* weights [[buffer(0)]], device float* out [[buffer(1)]],
                                constant ProbeParams& params [[buffer(2)]],
                                uint group [[threadgroup_position_in_grid]],
                                uint t [[thread_index_in_threadgroup]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half4 staged[kProbeRows * kProbePitch / 4];
  const uint pitch = params.steps * kProbeDepth;
  device const half* own = weights + group % kProbeTiles * kProbeRows * pitch;
  simdgroup_matrix<half, 8, 8> rows;
  const simdgroup_matrix<half, 8, 8> one(half(1.0f));
  simdgroup_matrix<float, 8, 8> sums[kProbeRows / 8];
  UNROLL for (uint r = 0; r < kProbeRows / 8; ++r) sums[r] = simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint step = 0; step < params.steps; ++step) {
    if (kStaged) {  // 128 threads copy 8 values each
      threadgroup_barrier(mem_flags::mem_threadgroup);
      device const half* from = own + t / 4 * pitch + step * kProbeDepth + t % 4 * 8;
      threadgroup half4* to = staged + t / 4 * (kProbePitch / 4) + t % 4 * 2;
      to[0] = *reinterpret_cast<device const half4*>(from);
      to[1] = *reinterpret_cast<device const half4*>(from + 4);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL for (uint k = 0; k < kProbeDepth; k += 8) {
      UNROLL for (uint r = 0; r < kProbeRows / 8; ++r) {
        if (kStaged)
          simdgroup_load(rows, reinterpret_cast<threadgroup const half*>(staged) + 8 * r * kProbePitch + k,
                         kProbePitch);
        else
          simdgroup_load(rows, own + 8 * r * pitch + step * kProbeDepth + k, pitch);
        simdgroup_multiply_accumulate(sums[r], rows, one, sums[r]);
      }
    }
  }
  device float* to = out + (group * 4 + simdgroup) * kProbeRows * 8;
  UNROLL for (uint r = 0; r < kProbeRows / 8; ++r) simdgroup_store(sums[r], to + 64 * r, 8);
}
INSTANTIATE("probe_fragments_direct", probe_fragments<false>)
INSTANTIATE("probe_fragments_staged", probe_fragments<true>)

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
