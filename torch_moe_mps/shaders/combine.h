// Steps behind the experts' matmuls: the gated activation, and the weighted sum over the slots of a token.
#pragma once
#include "common/any_vectors.h"
#include "common/sums.h"
#include "expert_sum.h"
#include "geometry/combine.h"
#include "params/combine.h"

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
    const Vector<T, 4> gates = load<4>(gate + first), ups = load<4>(up + first);
    store(output + first, silu(widen(gates)) * widen(ups));
    return;
  }
  for (ulong i = first; i < first + width && i < params.count; ++i)
    output[i] = T(silu(float(gate[i])) * float(up[i]));
}

// How many loads a thread that sums over slots has in flight.
constant constexpr uint kSlotBlock = 4;

// The slots [rows][count][width] and their weights [rows][count], as a lane reads them.
template <typename T>
struct Slots {
  device const T* slots;
  device const uchar* weights;
  uint weights_dtype;
  bool weighted;
  uint count;
  uint width;
  uint lane;

  // sum_s weights[s] * slots[s][column ...], s ascending. A simdgroup reads the weights once and passes them
  // on by shuffles, in which all lanes take part; a lane that is not `active` has no column.
  template <int N>
  Floats<N> sum(ulong row, uint column, bool active) const {
    Floats<N> sum = 0.0f;
    for (uint base = 0; base < count; base += kSimdWidth) {
      const bool has_weight = base + lane < count;
      float own_weight = 1.0f;
      if (weighted)
        own_weight = has_weight ? load_one(weights, weights_dtype, row * count + base + lane) : 0.0f;
      const uint slots_here = min(count - base, kSimdWidth);
      for (uint block = 0; block < slots_here; block += kSlotBlock) {
        device const T* source = slots + (row * count + base + block) * width + column;
        Vector<T, N> loaded[kSlotBlock];
        UNROLL for (uint s = 0; s < kSlotBlock; ++s) {
          if (active && block + s < slots_here) loaded[s] = load<N>(source + ulong(s) * width);
        }
        UNROLL for (uint s = 0; s < kSlotBlock; ++s) {
          // The shuffle is outside the branch: inside, the simdgroup would reconverge for every slot.
          const float weight = simd_shuffle(own_weight, ushort(block + s));
          if (active && block + s < slots_here) sum += weight * widen(loaded[s]);
        }
      }
    }
    return sum;
  }
};

template <int N, typename T>
inline void weighted_sum_columns(Slots<T> slots, device const uchar* shared_gate, device const T* shared,
                                 device const T* residual, device T* output, WeightedSumParams params,
                                 ulong row, uint column) {
  const bool active = column < params.width;
  const ulong place = row * params.width + column;
  Vector<T, N> own_shared, own_residual;  // in flight with the slots
  if (active && params.sum.has_shared != 0) own_shared = load<N>(shared + place);
  if (active && params.sum.has_residual != 0)
    own_residual = load<N>((params.in_place != 0 ? output : residual) + place);
  Floats<N> sum = slots.template sum<N>(row, column, active);
  if (!active) return;
  if (params.sum.has_shared != 0) sum += factor_of_shared(shared_gate, row, params.sum) * widen(own_shared);
  if (params.sum.has_residual != 0) sum += widen(own_residual);
  store(output + place, sum);
}

// output = sum over slots + gate * shared + residual. In place the residual is in `output`: a thread reads
// its columns before it writes.
template <typename T>
[[kernel]] void weighted_sum_rows(
    device const T* slots [[buffer(0)]], device const uchar* weights [[buffer(1)]],
    device const uchar* shared_gate [[buffer(2)]], device const T* shared [[buffer(3)]],
    device const T* residual [[buffer(4)]], device T* output [[buffer(5)]],
    constant WeightedSumParams& arguments [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 group_threads [[threads_per_threadgroup]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const WeightedSumParams params = arguments;
  const Slots<T> all = {
      slots, weights, params.sum.weights_dtype, params.has_weights != 0, params.slots, params.width, lane};
  const uint item = group.x * group_threads.x + thread_index;
  if (params.vectorised != 0) {
    weighted_sum_columns<4>(all, shared_gate, shared, residual, output, params, group.y, item * 4);
  } else {
    weighted_sum_columns<1>(all, shared_gate, shared, residual, output, params, group.y, item);
  }
}

// How many vectors a thread keeps from the sum to the norm, enough for rows of kSumNormThreads * 16 columns.
// The columns beyond are read again from `residual`, to which the sum was written.
constant constexpr uint kKeptSums = 4;

// The threads that share a row: all of the threadgroup.
struct SumThreads {
  uint index, simdgroup, simdgroups;
};

// A row: `residual` and `output` at its start.
template <int N, typename T>
inline void weighted_sum_norm_row(Slots<T> slots, device const uchar* norm_weight, device T* residual,
                                  device T* output, WeightedSumNormParams params, ulong row,
                                  SumThreads threads, threadgroup float* partials) {
  const uint step = threads.simdgroups * kSimdWidth * N, first = threads.index * N;
  Vector<T, N> kept[kKeptSums];
  AnyVector<N> first_weight;  // in flight during the sums
  if (first < params.width) first_weight = load_any_raw<N>(norm_weight, params.norm_dtype, first);
  float squares = 0.0f;
  UNROLL for (uint k = 0; k < kKeptSums; ++k) {
    if (k * step < params.width) {
      const uint column = k * step + first;
      const bool active = column < params.width;
      Vector<T, N> base;
      if (active) base = load<N>(residual + column);
      const Floats<N> sum = slots.template sum<N>(row, column, active);
      if (active) {
        kept[k] = narrow<T>(widen(base) + sum);
        store_raw<N>(residual + column, kept[k]);
        squares += sum_of_squares(widen(kept[k]));
      }
    }
  }
  for (uint group = kKeptSums * step; group < params.width; group += step) {
    const uint column = group + first;
    const bool active = column < params.width;
    const Floats<N> sum = slots.template sum<N>(row, column, active);
    if (active) {
      const Vector<T, N> x = narrow<T>(widen(load<N>(residual + column)) + sum);
      store_raw<N>(residual + column, x);
      squares += sum_of_squares(widen(x));
    }
  }

  const float total = threadgroup_sum(squares, partials, slots.lane, threads.simdgroup, threads.simdgroups);
  const float inverse = precise::rsqrt(total / float(params.width) + params.eps);

  UNROLL for (uint k = 0; k < kKeptSums; ++k) {
    const uint column = k * step + first;
    if (column < params.width) {
      AnyVector<N> weight = first_weight;
      if (k > 0) weight = load_any_raw<N>(norm_weight, params.norm_dtype, column);
      store(output + column, widen(kept[k]) * (inverse * widen<N>(weight, params.norm_dtype)));
    }
  }
  for (uint column = kKeptSums * step + first; column < params.width; column += step) {
    const Floats<N> weight = load_any<N>(norm_weight, params.norm_dtype, column);
    store(output + column, widen(load<N>(residual + column)) * (inverse * weight));
  }
}

// residual += sum over slots, then output = rms(residual) * norm_weight. A threadgroup takes a row and has
// few threads, so that each has enough registers for its loads in flight.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSumNormThreads)]] void weighted_sum_norm_rows(
    device T* residual [[buffer(0)]], device const T* slots [[buffer(1)]],
    device const uchar* weights [[buffer(2)]], device const uchar* norm_weight [[buffer(3)]],
    device T* output [[buffer(4)]], constant WeightedSumNormParams& arguments [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const WeightedSumNormParams params = arguments;
  threadgroup float partials[kMaxSimdgroups];
  const Slots<T> all = {slots, weights, params.weights_dtype, true, params.slots, params.width, lane};
  const SumThreads threads = {thread_index, simdgroup, simdgroups};
  residual += ulong(row) * params.width;
  output += ulong(row) * params.width;
  if (params.vectorised != 0) {
    weighted_sum_norm_row<4>(all, norm_weight, residual, output, params, row, threads, partials);
  } else {
    weighted_sum_norm_row<1>(all, norm_weight, residual, output, params, row, threads, partials);
  }
}

// The gradients of a weighted sum: of a weight the dot product of its slot with `dy`, of a slot its weight
// times `dy`. A simdgroup has a slot. Grid: blocks of slots.
template <typename T>
[[kernel]] void weighted_sum_backward(
    device const T* dy [[buffer(0)]], device const uchar* weights [[buffer(1)]],
    device const T* slots [[buffer(2)]], device float* of_weights [[buffer(3)]],
    device T* of_slots [[buffer(4)]], constant WeightedSumBackwardParams& params [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], LANES, uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint pair = group * simdgroups + simdgroup;
  if (pair >= params.pairs) return;
  const ulong place = ulong(pair) * params.width;
  dy += ulong(pair / params.slots) * params.width;
  const float weight = load_one(weights, params.weights_dtype, pair);
  float sum = 0.0f;
  if (params.vectorised != 0) {
    for (uint column = 4 * lane; column < params.width; column += 4 * kSimdWidth) {
      const Vector<T, 4> own = load<4>(dy + column), slot = load<4>(slots + place + column);
      sum += dot(widen(own), widen(slot));
      store(of_slots + place + column, weight * widen(own));
    }
  } else {
    for (uint column = lane; column < params.width; column += kSimdWidth) {
      const float own = float(dy[column]);
      sum = fma(own, float(slots[place + column]), sum);
      of_slots[place + column] = T(weight * own);
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) of_weights[pair] = sum;
}
