// For a few tokens: finds the pairs of an expert within the kernel that needs them, without another dispatch.
#pragma once
#include "common/simdgroups.h"
#include "matmul/common.h"
#include "matmul/pairs.h"

// The pairs of one expert in ascending order. A single pair is in `first`; several are in threadgroup memory.
struct PairList {
  uint expert;
  uint count;
  uint before;  // how many pairs the experts with lower ids have
  uint first;   // the lowest pair

  uint at(threadgroup const ushort* members, uint index) const { return count == 1 ? first : members[index]; }

  // M pairs from `start` on; past the end, the last pair again.
  template <int M>
  PairSet<M> some(threadgroup const ushort* members, uint start) const {
    PairSet<M> set;
    UNROLL for (int m = 0; m < M; ++m) set.v[m] = at(members, min(start + m, count - 1));
    return set;
  }
};

// Every simdgroup goes through all ids, so that none waits for another; the first one writes `members`.
inline PairList list_pairs(device const int* ids, uint expert, threadgroup ushort* members, uint lane,
                           uint simdgroup, constant MatmulParams& params) {
  PairList list = {expert, 0, 0, 0};
  for (uint base = 0; base < params.pairs; base += kSimdWidth) {
    const uint pair = base + lane;
    const bool exists = pair < params.pairs;
    const uint id = expert_of(ids, min(pair, params.pairs - 1), params);
    const uint hits = ballot(exists && id == expert);
    list.before += popcount(ballot(exists && id < expert));
    if (list.count == 0 && hits != 0) list.first = base + ctz(hits);
    if (simdgroup == 0 && (hits >> lane & 1) != 0) {
      members[list.count + popcount(hits & ((1u << lane) - 1))] = ushort(pair);
    }
    list.count += popcount(hits);
  }
  return list;
}

// grid.y is min(experts, pairs) + 1. With fewer experts than pairs, row y of the grid serves expert y;
// otherwise it serves the expert of pair y if y is that expert's first pair, and nothing if not. The last row
// serves the pairs without an expert.
inline PairList pairs_of_grid_row(device const int* ids, uint y, threadgroup ushort* members, uint lane,
                                  uint simdgroup, constant MatmulParams& params) {
  const PairList none = {params.experts, 0, 0, 0}, all = {0, params.pairs, 0, 0};
  if (params.has_ids == 0) {
    if (simdgroup == 0) {
      for (uint pair = lane; pair < params.pairs; pair += kSimdWidth) members[pair] = ushort(pair);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return all;
  }
  const bool by_expert = params.grid_by_expert != 0;
  const bool sentinels = y == (by_expert ? params.experts : params.pairs);
  uint expert = params.experts;
  if (!sentinels) expert = by_expert ? y : expert_of(ids, y, params);
  if (expert == params.experts && !sentinels) return none;
  const PairList list = list_pairs(ids, expert, members, lane, simdgroup, params);
  if (list.count == 0 || (!by_expert && !sentinels && list.first != y)) return none;
  if (list.count > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  return list;
}

// Writes what the down projection reads, as moe_bucket does for many tokens: the pairs sorted by expert, and
// tiles (expert, position, count, 0). The tile at an expert's first pair has all its pairs; the others have a
// count of 0.
inline void write_tile(PairList list, threadgroup const ushort* members, device int* pair_order,
                       device int4* tiles, uint thread_index, uint threads) {
  for (uint i = thread_index; i < list.count; i += threads) {
    pair_order[list.before + i] = int(list.at(members, i));
    tiles[list.before + i] = int4(int(list.expert), int(list.before), i == 0 ? int(list.count) : 0, 0);
  }
}
