// The first matmul of a few tokens' experts: gate and up rows, bias and activation; also any single matmul.
#pragma once
#include "matmul/dots.h"
#include "matmul/epilogue.h"
#include "matmul/pairs.h"

// Stores the outputs of a lane's rows for M pairs. All eight lanes have all of them, and each stores some.
template <typename T, int R, int M>
inline void store_outputs(Dots<R, M> dots, PairSet<M> pairs, uint count, Outputs<T> out, uint expert,
                          uint first, uint lane, constant MatmulParams& params) {
  const uint outputs = outputs_of_rows(R, params), rows_of_output = R / outputs;
  for (uint item = lane % kRowLanes; item < outputs * M; item += kRowLanes) {
    const uint m = item / outputs, local = item % outputs;
    const uint output = first + lane / kRowLanes * outputs + local;
    if (m >= count || output >= params.outputs) continue;
    const float own = picked(dots, rows_of_output * local, m);
    const float up = rows_of_output == 2 ? picked(dots, 2 * local + 1, m) : 0.0f;
    out.store(own, up, pairs.at(m), expert, output, params);
  }
}

// Computes M pairs of one expert, of which `count` exist.
template <typename W, int R, int M>
inline void rows_of_pairs(W weights, RowSet<R> rows, PairSet<M> pairs, uint count,
                          device const typename W::Element* x, Outputs<typename W::Element> out, uint expert,
                          uint first, uint lane, constant MatmulParams& params) {
  Sources<M> sources;
  UNROLL for (int m = 0; m < M; ++m) sources.v[m] = input_row(pairs.v[m], params) * params.inputs;
  const Dots<R, M> dots = row_dots<W, R, M>(weights, rows, x, sources, lane, params);
  store_outputs(dots, pairs, count, out, expert, first, lane, params);
}

// Each pair reads the rows of its expert by itself: right for one token, slow for many. Grid: (blocks of
// rows, pairs).
template <typename W, int R>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows(
    MATMUL_BUFFERS(typename W::Element), uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  const uint pair = group.y;
  const uint count = outputs_of_rows(kRowGroups * R, params);
  const uint first = (group.x * kSingleSimdgroups + simdgroup) * count;
  if (first >= params.outputs) return;
  const uint expert = params.has_ids != 0 ? expert_of(ids, pair, params) : 0;
  if (expert == params.experts) {
    if (lane < min(count, params.outputs - first)) out[ulong(pair) * params.outputs + first + lane] = T(0.0f);
    return;
  }
  const W weights(packed, scales, biases, expert, params);
  const PairSet<1> pairs = {{pair}};
  rows_of_pairs<W, R, 1>(weights, rows_of_lane<R>(first, lane, params), pairs, 1, x, {bias, residual, out},
                         expert, first, lane, params);
}

// A threadgroup takes some rows of one expert and every pair that chose it, so that the rows are read from
// memory once. Grid: (blocks of rows, units and one more for pairs without an expert).
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows_few(
    MATMUL_BUFFERS(typename W::Element), device int* pair_order [[buffer(9)]],
    device int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int R = kFewRows;
  constexpr uint kThreads = kFewSimdgroups * kSimdWidth;
  threadgroup ushort members[kMaxFewPairs];
  const uint count = outputs_of_rows(kRowGroups * R, params);
  const uint first_of_group = group.x * kFewSimdgroups * count;
  const uint first = first_of_group + simdgroup * count;
  const PairList list = pairs_of_unit(ids, group.y, members, lane, simdgroup, params);
  if (list.count == 0) return;
  if (group.x == 0 && params.writes_tiles != 0) {
    write_tile(list, members, pair_order, tiles, thread_index, kThreads);
  }
  if (list.expert == params.experts) {
    const uint columns = min(params.outputs - first_of_group, kFewSimdgroups * count);
    for (uint i = thread_index; i < list.count * columns; i += kThreads) {
      out[ulong(list.at(members, i / columns)) * params.outputs + first_of_group + i % columns] = T(0.0f);
    }
    return;
  }
  if (first >= params.outputs) return;
  const W weights(packed, scales, biases, list.expert, params);
  const RowSet<R> rows = rows_of_lane<R>(first, lane, params);
  const Outputs<T> outputs = {bias, residual, out};
  for (uint start = 0; start < list.count;) {
    const uint left = list.count - start;
    if (W::kPairs > 1 && left > 1) {
      rows_of_pairs<W, R, W::kPairs>(weights, rows, list.template some<W::kPairs>(members, start), left, x,
                                     outputs, list.expert, first, lane, params);
      start += W::kPairs;
    } else {
      rows_of_pairs<W, R, 1>(weights, rows, list.template some<1>(members, start), left, x, outputs,
                             list.expert, first, lane, params);
      start += 1;
    }
  }
}
