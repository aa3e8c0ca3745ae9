// RMSNorm and LayerNorm, by themselves or fused with the residual stream: a row for each threadgroup, or for
// each simdgroup where rows are short.
#pragma once
#include "common/activations.h"
#include "common/any_vectors.h"
#include "common/sums.h"
#include "geometry/norms.h"
#include "params/norms.h"

// How many elements a thread keeps in registers from the first pass over a row to the second: rows of up to
// 16 * kNormThreads columns are read once, and columns beyond that twice.
constant constexpr int kNormElements = 16;

// Joined to the norm: nothing, a residual that is added to the norm of the input, a residual that is
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

// N neighbouring columns of the residual (or gate) and of the input.
template <typename T, int N>
struct Columns {
  Vector<T, N> residual, input;
};

// A row and what is read and written with it. A LayerNorm (kCentred) takes the mean away first and has a
// bias, or none, where others have their scale.
template <typename T, int N, int kJoin, bool kCentred>
struct NormRow {
  static constant constexpr bool kAlwaysWeighted = kJoin != JOIN_NONE && !kCentred;

  device const T* residual;
  device const T* input;
  device const uchar* weight;
  device const uchar* scalar;
  device T* output;
  device T* sum;
  uint first_weight;  // of the row

  Columns<T, N> columns(uint column) const {
    Columns<T, N> x;
    if constexpr (kJoin != JOIN_NONE) x.residual = load<N>(residual + column);
    x.input = load<N>(input + column);
    return x;
  }

  // The columns to be normed: of the input, or of residual + input * factor rounded to T, as the residual
  // stream is.
  Vector<T, N> normed(Columns<T, N> x, constant NormParams& params) const {
    if constexpr (kJoin != JOIN_SUM) return x.input;
    return narrow<T>(widen(x.input) * params.factor + widen(x.residual));
  }

  AnyVector<N> weights(uint column, constant NormParams& params) const {
    if (!kAlwaysWeighted && params.has_weight == 0) return AnyVector<N>{};
    return load_any_raw<N>(weight, params.weight_dtype, first_weight + column);
  }

  Floats<N> gate(Vector<T, N> raw, constant NormParams& params) const {
    const Floats<N> x = widen(raw);
    return params.gate_is_sigmoid != 0 ? sigmoid(x) : silu(x);
  }

  Floats<N> scale(uint column, constant NormParams& params) const {
    if (params.scalar_kind == SCALAR_PER_COLUMN) return load_any<N>(scalar, params.scalar_dtype, column);
    return Floats<N>(params.scalar_kind == SCALAR_SINGLE ? load_one(scalar, params.scalar_dtype, 0) : 1.0f);
  }

  // Stores what is to be stored of the sum, and returns the sum of the squares of what is normed.
  float add(uint column, Columns<T, N> x, float mean, constant NormParams& params) const {
    if (kJoin == JOIN_SUM && params.write_sum != 0) store_raw<N>(sum + column, x.input);
    if constexpr (kCentred) return sum_of_squares(widen(x.input) - mean);
    if constexpr (kJoin == JOIN_GATE) {
      if (params.gate_first != 0) return sum_of_squares(widen(x.input) * gate(x.residual, params));
    }
    return sum_of_squares(widen(x.input));
  }

  // Stores (residual + x * inverse * weight) * scale. Only JOIN_NORM has the residual, and JOIN_NONE no
  // scale. JOIN_GATE stores x * inverse * weight * gate, whichever is first. A LayerNorm stores
  // (x - mean) * inverse * weight + bias.
  void finish(uint column, Vector<T, N> base, Vector<T, N> x, float mean, float inverse,
              AnyVector<N> raw_weight, constant NormParams& params) const {
    Floats<N> factor = 1.0f, wide = widen(x);
    if constexpr (kCentred) wide -= mean;
    if (kAlwaysWeighted || params.has_weight != 0) factor = widen<N>(raw_weight, params.weight_dtype);
    Floats<N> y = wide * inverse * (factor + params.weight_offset);
    if constexpr (kCentred) {
      if (params.scalar_kind != SCALAR_NONE) y += load_any<N>(scalar, params.scalar_dtype, column);
    } else if constexpr (kJoin == JOIN_NORM || kJoin == JOIN_SUM) {
      if constexpr (kJoin == JOIN_NORM) y += widen(base);
      y *= scale(column, params);
    } else if constexpr (kJoin == JOIN_GATE) {
      y *= gate(base, params);
    }
    store(output + column, y);
  }
};

// Norms a row. Its first columns stay in registers from the sum to the norm; all of them, and the first
// weights, are in flight during the reduction. Columns beyond are read again.
template <typename T, int N, int kJoin, bool kCentred>
inline void norm_row(NormRow<T, N, kJoin, kCentred> row, constant NormParams& params, RowThreads threads,
                     threadgroup float* partials) {
  constexpr int kKept = kNormElements / N;
  const uint step = threads.count * N, first = threads.index * N, rest = first + kKept * step;
  Columns<T, N> kept[kKept];
  AnyVector<N> first_weight;
  float squares = 0.0f;
  UNROLL for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) kept[k] = row.columns(column);
  }
  if (first < params.width) first_weight = row.weights(first, params);
  float mean = 0.0f;
  if constexpr (kCentred) {
    const Floats<N> ones = 1.0f;
    float sum = 0.0f;
    UNROLL for (int k = 0; k < kKept; ++k) {
      if (first + k * step < params.width) sum = add_dot(sum, widen(row.normed(kept[k], params)), ones);
    }
    for (uint column = rest; column < params.width; column += step) {
      sum = add_dot(sum, widen(row.normed(row.columns(column), params)), ones);
    }
    mean = row_sum(sum, threads, partials + kMaxSimdgroups) / float(params.width);
  }
  UNROLL for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column >= params.width) continue;
    kept[k].input = row.normed(kept[k], params);
    squares += row.add(column, kept[k], mean, params);
  }
  for (uint column = rest; column < params.width; column += step) {
    Columns<T, N> x = row.columns(column);
    x.input = row.normed(x, params);
    squares += row.add(column, x, mean, params);
  }

  const float total = row_sum(squares, threads, partials);
  float inverse = precise::rsqrt(total / float(params.width) + params.eps);
  if constexpr (kJoin == JOIN_NONE) inverse *= params.factor;

  UNROLL for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column >= params.width) continue;
    AnyVector<N> weight = first_weight;
    if (k > 0) weight = row.weights(column, params);
    row.finish(column, kept[k].residual, kept[k].input, mean, inverse, weight, params);
  }
  for (uint column = rest; column < params.width; column += step) {
    const Columns<T, N> x = row.columns(column);
    row.finish(column, x.residual, row.normed(x, params), mean, inverse, row.weights(column, params), params);
  }
}

template <typename T, int kJoin, bool kCentred>
[[kernel, max_total_threads_per_threadgroup(kNormThreads)]] void norm_rows(
    device const T* residual [[buffer(0)]], device const T* input [[buffer(1)]],
    device const uchar* weight [[buffer(2)]], device const uchar* scalar [[buffer(3)]],
    device T* output [[buffer(4)]], device T* sum_output [[buffer(5)]],
    constant NormParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partials[kCentred ? 2 * kMaxSimdgroups : kMaxSimdgroups];
  const bool row_per_simdgroup = params.simdgroups_per_row == 1;
  const uint row = row_per_simdgroup ? group * simdgroups + simdgroup : group;
  if (row >= params.rows) return;
  const RowThreads threads = {row_per_simdgroup ? lane : thread_index, params.simdgroups_per_row * kSimdWidth,
                              lane, simdgroup, params.simdgroups_per_row};
  const ulong start = ulong(row) * params.width;
  residual += start;
  input += ulong(row) * params.input_stride;
  output += start;
  sum_output += start;
  constexpr bool grouped = !kCentred && (kJoin == JOIN_NONE || kJoin == JOIN_GATE);
  const uint first_weight = grouped && params.groups > 1 ? row % params.groups * params.width : 0;
  if (params.vectorised != 0) {
    const NormRow<T, 4, kJoin, kCentred> columns = {residual, input,      weight,      scalar,
                                                    output,   sum_output, first_weight};
    norm_row(columns, params, threads, partials);
  } else {
    const NormRow<T, 1, kJoin, kCentred> columns = {residual, input,      weight,      scalar,
                                                    output,   sum_output, first_weight};
    norm_row(columns, params, threads, partials);
  }
}
