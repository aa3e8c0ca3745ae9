// The second matmul of a few tokens' experts, which reads an expert's rows once for all of its pairs.
#pragma once
#include "common/simdgroups.h"
#include "matmul/down.h"

// Computes the terms of the first `count` pairs of `list`. Several at a time share one reading of the rows.
template <typename W, int R>
inline void add_all(TermsBlock<W, R> block, device const int* list, uint count,
                    constant ExpertDownParams& params) {
  constexpr int M = kFewPairs;
  for (uint start = 0; start < count;) {
    const uint left = count - start;
    if (left > 1) {
      PairSet<M> pairs;
      UNROLL for (int m = 0; m < M; ++m) pairs.v[m] = uint(list[min(start + m, count - 1)]);
      block.add(pairs, pairs, left, params);
      start += M;
    } else {
      const PairSet<1> pair = {{uint(list[start])}};
      block.add(pair, pair, left, params);
      start += 1;
    }
  }
}

// A threadgroup computes kFewDownRows rows for all pairs; its simdgroups take turns at the
// experts of `tiles`. Grid: blocks of rows. Threadgroup memory: kFewDownRows floats for each pair.
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kFewBound)]] void expert_down_few(
    DOWN_BUFFERS(typename W::Element), device const int* pair_order [[buffer(12)]],
    device const int4* tiles [[buffer(13)]], threadgroup float* memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int R = kFewDownRows / kRowGroups;
  constant MatmulParams& matmul = params.matmul;
  const PairTerms<kFewDownRows> terms = {memory};
  const uint first = group * kFewDownRows;
  uint others = simdgroup;  // whose turn comes first
  for (uint base = 0; base < matmul.pairs; base += kSimdWidth) {
    const uint position = base + lane;
    int4 own = int4(0);
    if (position < matmul.pairs) own = tiles[position];
    const bool has_expert = own.x < int(matmul.experts);
    if (!has_expert && simdgroup == 0) terms.clear(uint(pair_order[position]));
    const uint starts = ballot(own.z > 0 && has_expert);
    for (uint left = starts; left != 0; left &= left - 1) {
      if (others > 0) {
        --others;
        continue;
      }
      others = simdgroups - 1;
      const int4 tile = tiles[base + ctz(left)];
      const uint expert = uint(tile.x);
      const W weights(packed, scales, biases, expert, matmul);
      const TermsBlock<W, R> block = {row_block<R>(weights, x, expert, first, lane, matmul), routing, bias,
                                      terms};
      add_all(block, pair_order + tile.y, uint(tile.z), params);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Addends<T> addends = {shared_gate, shared_out, residual};
  store_combined<T>(terms, ids, routing, 0, matmul.tokens, first, addends, out, thread_index,
                    simdgroups * kSimdWidth, params);
}
