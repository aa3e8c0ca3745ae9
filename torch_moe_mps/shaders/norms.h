// RMSNorm, alone and fused with the residual stream: one row per threadgroup, or per simdgroup where rows are
// short.
#pragma once
#include "common.h"

// How many elements a thread keeps in registers from the first pass over a row to the second: rows of up to
// 16 * kNormThreads columns are read once, and columns beyond that twice.
constant constexpr int kNormElements = 16;

// What is joined to the norm: nothing, a residual that is added to the norm of the input, a residual that is
// added to the input before the norm, or a gate.
#define JOIN_NONE 0
#define JOIN_NORM 1
#define JOIN_SUM 2
#define JOIN_GATE 3

// The threads that work on one row.
struct RowThreads {
  uint index;
  uint count;
  uint lane;
  uint simdgroup;
  uint simdgroups;
};

inline float row_sum(float value, RowThreads threads, threadgroup float* partials) {
  if (threads.simdgroups == 1) return simd_sum(value);
  return threadgroup_sum(value, partials, threads.lane, threads.simdgroup, threads.simdgroups);
}

template <int N>
inline Pack<N> output_scale(device const uchar* scalar, constant NormParams& params, uint column) {
  if (params.scalar_kind == SCALAR_PER_COLUMN) return load_any<N>(scalar, params.scalar_dtype, column);
  const float value = params.scalar_kind == SCALAR_SINGLE ? load_one(scalar, params.scalar_dtype, 0) : 1.0f;
  Pack<N> scale;
  UNROLL for (int i = 0; i < N; ++i) scale.v[i] = value;
  return scale;
}

// The columns to be normed: of the input, or of residual + input rounded to T, as the residual stream is.
template <typename T, int N, int kJoin>
inline Raw<T, N> normed_columns(Raw<T, N> residual, Raw<T, N> input) {
  if constexpr (kJoin != JOIN_SUM) return input;
  Pack<N> sum = widen(input);
  const Pack<N> base = widen(residual);
  UNROLL for (int i = 0; i < N; ++i) sum.v[i] += base.v[i];
  return narrow<T>(sum);
}

template <typename T, int N, int kJoin>
inline Raw<T, N> residual_columns(device const T* residual) {
  if constexpr (kJoin == JOIN_NONE) return Raw<T, N>{};
  return load_raw<N>(residual);
}

// A missing weight counts as 1. Only a norm with nothing joined to it may lack its weight.
template <int N, int kJoin>
inline Pack<N> weight_columns(AnyRaw<N> raw, constant NormParams& params) {
  if (kJoin != JOIN_NONE || params.has_weight != 0) return widen(raw, params.weight_dtype);
  Pack<N> weight;
  UNROLL for (int i = 0; i < N; ++i) weight.v[i] = 1.0f;
  return weight;
}

template <int N, int kJoin>
inline AnyRaw<N> load_weight(device const uchar* weight, constant NormParams& params, uint column) {
  if (kJoin == JOIN_NONE && params.has_weight == 0) return AnyRaw<N>{};
  return load_any_raw<N>(weight, params.weight_dtype, column);
}

// (residual + x * inverse * weight) * scale. JOIN_NORM alone has the residual, JOIN_NONE has no scale.
// JOIN_GATE computes x * inverse * weight * silu(gate).
template <int N, int kJoin>
inline Pack<N> finished_columns(Pack<N> residual, Pack<N> x, float inverse, Pack<N> weight,
                                device const uchar* scalar, constant NormParams& params, uint column) {
  UNROLL for (int i = 0; i < N; ++i) {
    x.v[i] = x.v[i] * inverse * (weight.v[i] + params.weight_offset);
    if constexpr (kJoin == JOIN_NORM) x.v[i] += residual.v[i];
    if constexpr (kJoin == JOIN_GATE) x.v[i] *= residual.v[i] * sigmoid(residual.v[i]);
  }
  if constexpr (kJoin == JOIN_NONE || kJoin == JOIN_GATE) return x;
  const Pack<N> scale = output_scale<N>(scalar, params, column);
  UNROLL for (int i = 0; i < N; ++i) x.v[i] *= scale.v[i];
  return x;
}

template <typename T, int N, int kJoin>
inline void norm_row(device const T* residual, device const T* input, device const uchar* weight,
                     device const uchar* scalar, device T* output, device T* sum_output,
                     constant NormParams& params, RowThreads threads, threadgroup float* partials) {
  constexpr int kKept = kNormElements / N;
  const uint step = threads.count * N;
  const uint first = threads.index * N;
  Raw<T, N> base[kKept];  // loaded with the first pass, to be in flight during the reduction
  Raw<T, N> row[kKept];
  AnyRaw<N> first_weight;
  float sum = 0.0f;
  UNROLL for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) {
      base[k] = residual_columns<T, N, kJoin>(residual + column);
      row[k] = load_raw<N>(input + column);
    }
  }
  if (first < params.width) first_weight = load_weight<N, kJoin>(weight, params, first);
  UNROLL for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) {
      row[k] = normed_columns<T, N, kJoin>(base[k], row[k]);
      if (kJoin == JOIN_SUM && params.write_sum != 0) store_raw(sum_output + column, row[k]);
      sum += sum_of_squares(widen(row[k]));
    }
  }
  const uint rest = first + kKept * step;
  for (uint column = rest; column < params.width; column += step) {
    const Raw<T, N> x = normed_columns<T, N, kJoin>(residual_columns<T, N, kJoin>(residual + column),
                                                    load_raw<N>(input + column));
    if (kJoin == JOIN_SUM && params.write_sum != 0) store_raw(sum_output + column, x);
    sum += sum_of_squares(widen(x));
  }

  const float total = row_sum(sum, threads, partials);
  const float inverse = precise::rsqrt(total / float(params.width) + params.eps);

  UNROLL for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) {
      AnyRaw<N> raw = first_weight;
      if (k > 0) raw = load_weight<N, kJoin>(weight, params, column);
      const Pack<N> factor = weight_columns<N, kJoin>(raw, params);
      store_pack(output + column, finished_columns<N, kJoin>(widen(base[k]), widen(row[k]), inverse, factor,
                                                             scalar, params, column));
    }
  }
  for (uint column = rest; column < params.width; column += step) {
    const Raw<T, N> r = residual_columns<T, N, kJoin>(residual + column);
    const Raw<T, N> x = normed_columns<T, N, kJoin>(r, load_raw<N>(input + column));
    const Pack<N> factor = weight_columns<N, kJoin>(load_weight<N, kJoin>(weight, params, column), params);
    store_pack(output + column,
               finished_columns<N, kJoin>(widen(r), widen(x), inverse, factor, scalar, params, column));
  }
}

template <typename T, int kJoin>
[[kernel, max_total_threads_per_threadgroup(kNormThreads)]] void norm_rows(
    device const T* residual [[buffer(0)]], device const T* input [[buffer(1)]],
    device const uchar* weight [[buffer(2)]], device const uchar* scalar [[buffer(3)]],
    device T* output [[buffer(4)]], device T* sum_output [[buffer(5)]],
    constant NormParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partials[kMaxSimdgroups];
  const bool row_per_simdgroup = params.simdgroups_per_row == 1;
  const uint row = row_per_simdgroup ? group * simdgroups + simdgroup : group;
  if (row >= params.rows) return;
  const RowThreads threads = {row_per_simdgroup ? lane : thread_index, params.simdgroups_per_row * kSimdWidth,
                              lane, simdgroup, params.simdgroups_per_row};
  const ulong start = ulong(row) * params.width;
  const ulong input_start = row * params.input_stride;
  if (params.vectorised != 0) {
    norm_row<T, 4, kJoin>(residual + start, input + input_start, weight, scalar, output + start,
                          sum_output + start, params, threads, partials);
  } else {
    norm_row<T, 1, kJoin>(residual + start, input + input_start, weight, scalar, output + start,
                          sum_output + start, params, threads, partials);
  }
}
