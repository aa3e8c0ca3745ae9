// The first matmul of a few tokens' experts, which reads an expert's rows once for all of its pairs; also any
// single matmul.
#pragma once
#include "matmul/pair_lists.h"
#include "matmul/rows.h"

// Computes M pairs of one expert, of which `count` exist. `memory`: for SharedDots.
template <typename W, int R, int M, bool kSplit>
inline void rows_of_pairs(RowBlock<W, R> block, PairSet<M> pairs, uint count, threadgroup float* memory,
                          uint simdgroup, Outputs<typename W::Element> out, constant MatmulParams& params) {
  const Share share = {kSplit ? simdgroup : 0, kSplit ? uint(kFewSimdgroups) : 1};
  const Dots<R, M> dots = block.dots(sources_of(pairs, params), share, params);
  // Where a row's chunk leaves no registers; for others it takes 5 % longer on an H100.
  if constexpr (sizeof(typename W::template Chunk<W::kValues>) > 24)
    block.lane = anew(block.lane, block.lane);
  if constexpr (kSplit) {
    const SharedDots<R, M> sums(dots, memory, simdgroup, block.lane);
    if (simdgroup == 0) store_outputs<W, R, M>(block, sums, pairs, count, out, params);
  } else {
    store_outputs<W, R, M>(block, dots, pairs, count, out, params);
  }
}

// A threadgroup takes some rows of one expert and every pair that chose it, so that the rows are read from
// memory once. Its simdgroups have different rows or, with kSplit, for few threadgroups, the same rows and a
// share of the inputs each. Grid: (blocks of rows, see pairs_of_grid_row).
template <typename W, bool kSplit>
[[kernel, max_total_threads_per_threadgroup(kFewBound)]] void matmul_rows_few(
    MATMUL_BUFFERS(typename W::Element), device int* pair_order [[buffer(9)]],
    device int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int R = kFewRows, M = kFewPairs;
  const uint threads = simdgroups * kSimdWidth;
  threadgroup ushort members[kMaxFewPairs];
  constexpr uint kSumsOfTurn = kSplit ? kFewSimdgroups * SharedDots<R, M>::kSize : 1;
  threadgroup float sums[2][kSumsOfTurn];  // of even and of odd turns
  const uint count = outputs_of_rows(kRowGroups * R, params);
  const uint count_of_group = (kSplit ? 1 : simdgroups) * count;
  const uint first_of_group = group.x * count_of_group,
             first = first_of_group + (kSplit ? 0 : simdgroup * count);
  const PairList list = pairs_of_grid_row(ids, group.y, members, lane, simdgroup, params);
  if (list.count == 0) return;
  if (group.x == 0 && params.writes_tiles != 0) {
    write_tile(list, members, pair_order, tiles, thread_index, threads);
  }
  if (list.expert == params.experts) {
    const uint columns = min(params.outputs - first_of_group, count_of_group);
    for (uint i = thread_index; i < list.count * columns; i += threads) {
      out[ulong(list.at(members, i / columns)) * params.outputs + first_of_group + i % columns] = T(0.0f);
    }
    return;
  }
  if (first >= params.outputs) return;
  const W weights(packed, scales, biases, list.expert, params);
  const RowBlock<W, R> block = row_block<R>(weights, x, list.expert, first, lane, params);
  const Outputs<T> outputs = {bias, residual, out, ids};
  for (uint start = 0, turn = 0; start < list.count; ++turn) {
    const uint left = list.count - start;
    threadgroup float* memory = sums[turn % 2];
    if (left > 1) {
      const PairSet<M> pairs = list.template some<M>(members, start);
      rows_of_pairs<W, R, M, kSplit>(block, pairs, left, memory, simdgroup, outputs, params);
      start += M;
    } else {
      const PairSet<1> pair = list.template some<1>(members, start);
      rows_of_pairs<W, R, 1, kSplit>(block, pair, left, memory, simdgroup, outputs, params);
      start += 1;
    }
  }
}
