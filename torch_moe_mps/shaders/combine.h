// What follows the experts' matmuls: the gated activation, and the weighted sum over the slots of a token.
#pragma once
#include "common.h"

inline float silu_mul(float gate, float up) {
  return gate / (1.0f + precise::exp(-gate)) * up;
}

template <typename T>
[[kernel]] void silu_mul_stacked(device const T* gate [[buffer(0)]], device const T* up [[buffer(1)]],
                                 device T* output [[buffer(2)]],
                                 constant SiluMulParams& arguments [[buffer(3)]],
                                 uint group [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]]) {
  const SiluMulParams params = arguments;
  const uint width = params.vectorised != 0 ? 4 : 1;
  const ulong first = (ulong(group) * kSiluThreads + thread_index) * width;
  if (width == 4 && first + 4 <= params.count) {
    const Raw<T, 4> raw_gate = load_raw<4>(gate + first);
    const Raw<T, 4> raw_up = load_raw<4>(up + first);
    const Pack<4> g = widen(raw_gate);
    const Pack<4> u = widen(raw_up);
    Pack<4> out;
    UNROLL for (int i = 0; i < 4; ++i) out.v[i] = silu_mul(g.v[i], u.v[i]);
    store_pack(output + first, out);
    return;
  }
  for (ulong i = first; i < first + width && i < params.count; ++i)
    output[i] = T(silu_mul(float(gate[i]), float(up[i])));
}

// How many loads a thread that sums over slots has in flight.
constant constexpr uint kSlotBlock = 4;

// sum_s weights[s] * slots[s][column ...], s ascending. A simdgroup reads the weights once and passes them on
// by shuffles, in which all lanes take part; a lane that is not `active` has no column.
template <typename T, int N>
inline Pack<N> sum_over_slots(device const T* slots, device const uchar* weights, uint weights_dtype,
                              ulong row, uint count, uint width, uint column, bool active, uint lane) {
  Pack<N> sum;
  UNROLL for (int i = 0; i < N; ++i) sum.v[i] = 0.0f;
  for (uint base = 0; base < count; base += kSimdWidth) {
    const bool has_weight = base + lane < count;
    const float lane_weight = has_weight ? load_one(weights, weights_dtype, row * count + base + lane) : 0.0f;
    const uint slots_here = min(count - base, kSimdWidth);
    for (uint block = 0; block < slots_here; block += kSlotBlock) {
      device const T* source = slots + (row * count + base + block) * width + column;
      Raw<T, N> loaded[kSlotBlock];
      UNROLL for (uint s = 0; s < kSlotBlock; ++s) {
        if (active && block + s < slots_here) loaded[s] = load_raw<N>(source + ulong(s) * width);
      }
      UNROLL for (uint s = 0; s < kSlotBlock; ++s) {
        // The shuffle stands outside of the branch: inside, the simdgroup would reconverge for every slot.
        const float weight = simd_shuffle(lane_weight, ushort(block + s));
        if (active && block + s < slots_here) {
          const Pack<N> x = widen(loaded[s]);
          UNROLL for (int i = 0; i < N; ++i) sum.v[i] += weight * x.v[i];
        }
      }
    }
  }
  return sum;
}

template <typename T, int N>
inline void weighted_sum_columns(device const T* slots, device const uchar* weights,
                                 device const uchar* shared_gate, device const T* shared,
                                 device const T* residual, device T* output, WeightedSumParams params,
                                 ulong row, uint column, uint lane) {
  const bool active = column < params.width;
  const ulong place = row * params.width + column;
  Raw<T, N> raw_shared;  // in flight with the slots
  Raw<T, N> raw_residual;
  if (active && params.has_shared != 0) raw_shared = load_raw<N>(shared + place);
  if (active && params.has_residual != 0) raw_residual = load_raw<N>(residual + place);
  Pack<N> sum = sum_over_slots<T, N>(slots, weights, params.weights_dtype, row, params.slots, params.width,
                                     column, active, lane);
  if (!active) return;
  if (params.has_shared != 0) {
    float gate = params.has_gate != 0 ? load_one(shared_gate, params.gate_dtype, row) : 1.0f;
    if (params.has_gate != 0 && params.gate_is_logit != 0) gate = sigmoid(gate);
    const Pack<N> x = widen(raw_shared);
    UNROLL for (int i = 0; i < N; ++i) sum.v[i] += gate * x.v[i];
  }
  if (params.has_residual != 0) {
    const Pack<N> x = widen(raw_residual);
    UNROLL for (int i = 0; i < N; ++i) sum.v[i] += x.v[i];
  }
  store_pack(output + place, sum);
}

// output = sum over slots + gate * shared + residual. `output` may be `residual`: a thread reads its columns
// before it writes.
template <typename T>
[[kernel]] void weighted_sum_rows(
    device const T* slots [[buffer(0)]], device const uchar* weights [[buffer(1)]],
    device const uchar* shared_gate [[buffer(2)]], device const T* shared [[buffer(3)]],
    device const T* residual [[buffer(4)]], device T* output [[buffer(5)]],
    constant WeightedSumParams& arguments [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 group_threads [[threads_per_threadgroup]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const WeightedSumParams params = arguments;
  const uint item = group.x * group_threads.x + thread_index;
  if (params.vectorised != 0) {
    weighted_sum_columns<T, 4>(slots, weights, shared_gate, shared, residual, output, params, group.y,
                               item * 4, lane);
  } else {
    weighted_sum_columns<T, 1>(slots, weights, shared_gate, shared, residual, output, params, group.y, item,
                               lane);
  }
}

// How many vectors a thread keeps from the sum to the norm, enough for rows of kSumNormThreads * 16 columns.
// The columns beyond are read again from `residual`, to which the sum was written.
constant constexpr uint kKeptSums = 4;

template <int N>
inline Pack<N> added(Pack<N> a, Pack<N> b) {
  UNROLL for (int i = 0; i < N; ++i) a.v[i] += b.v[i];
  return a;
}

template <int N>
inline Pack<N> scaled(Pack<N> x, float factor, Pack<N> weight) {
  UNROLL for (int i = 0; i < N; ++i) x.v[i] *= factor * weight.v[i];
  return x;
}

template <typename T, int N>
inline void weighted_sum_norm_row(device T* residual, device const T* slots, device const uchar* weights,
                                  device const uchar* norm_weight, device T* output,
                                  WeightedSumNormParams params, ulong row, uint thread_index, uint threads,
                                  uint lane, uint simdgroup, uint simdgroups, threadgroup float* partials) {
  const ulong start = row * params.width;
  const uint step = threads * N;
  const uint first_column = thread_index * N;
  Raw<T, N> kept[kKeptSums];
  AnyRaw<N> first_weight;  // in flight during the sums
  if (first_column < params.width)
    first_weight = load_any_raw<N>(norm_weight, params.norm_dtype, first_column);
  float squares = 0.0f;
  UNROLL for (uint k = 0; k < kKeptSums; ++k) {
    if (k * step < params.width) {
      const uint column = k * step + first_column;
      const bool active = column < params.width;
      Raw<T, N> base;
      if (active) base = load_raw<N>(residual + start + column);
      const Pack<N> sum = sum_over_slots<T, N>(slots, weights, params.weights_dtype, row, params.slots,
                                               params.width, column, active, lane);
      if (active) {
        kept[k] = narrow<T>(added(widen(base), sum));
        store_raw(residual + start + column, kept[k]);
        squares += sum_of_squares(widen(kept[k]));
      }
    }
  }
  for (uint group = kKeptSums * step; group < params.width; group += step) {
    const uint column = group + first_column;
    const bool active = column < params.width;
    const Pack<N> sum = sum_over_slots<T, N>(slots, weights, params.weights_dtype, row, params.slots,
                                             params.width, column, active, lane);
    if (active) {
      const Raw<T, N> x = narrow<T>(added(load_pack<N>(residual + start + column), sum));
      store_raw(residual + start + column, x);
      squares += sum_of_squares(widen(x));
    }
  }

  const float total = threadgroup_sum(squares, partials, lane, simdgroup, simdgroups);
  const float inverse = precise::rsqrt(total / float(params.width) + params.eps);

  UNROLL for (uint k = 0; k < kKeptSums; ++k) {
    const uint column = k * step + first_column;
    if (column < params.width) {
      const Pack<N> weight = k == 0 ? widen(first_weight, params.norm_dtype)
                                    : load_any<N>(norm_weight, params.norm_dtype, column);
      store_pack(output + start + column, scaled(widen(kept[k]), inverse, weight));
    }
  }
  for (uint column = kKeptSums * step + first_column; column < params.width; column += step) {
    const Pack<N> weight = load_any<N>(norm_weight, params.norm_dtype, column);
    store_pack(output + start + column, scaled(load_pack<N>(residual + start + column), inverse, weight));
  }
}

// residual += sum over slots, then output = rms(residual) * norm_weight. A threadgroup takes a row and has
// few threads, so that each has enough registers for its loads in flight.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSumNormThreads)]] void weighted_sum_norm_rows(
    device T* residual [[buffer(0)]], device const T* slots [[buffer(1)]],
    device const uchar* weights [[buffer(2)]], device const uchar* norm_weight [[buffer(3)]],
    device T* output [[buffer(4)]], constant WeightedSumNormParams& arguments [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const WeightedSumNormParams params = arguments;
  threadgroup float partials[kMaxSimdgroups];
  const uint threads = simdgroups * kSimdWidth;
  if (params.vectorised != 0) {
    weighted_sum_norm_row<T, 4>(residual, slots, weights, norm_weight, output, params, row, thread_index,
                                threads, lane, simdgroup, simdgroups, partials);
  } else {
    weighted_sum_norm_row<T, 1>(residual, slots, weights, norm_weight, output, params, row, thread_index,
                                threads, lane, simdgroup, simdgroups, partials);
  }
}
