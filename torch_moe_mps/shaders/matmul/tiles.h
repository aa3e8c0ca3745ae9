// Tiles of pairs: what a threadgroup works on when it multiplies a block of rows with several pairs of one
// expert.
#pragma once
#include "matmul/epilogue.h"

// The pairs of a tile: consecutive entries of a list, or without a list consecutive pairs, from `first` on.
struct TilePairs {
  device const int* list;
  uint first;
  uint count;
  bool listed;

  uint at(uint index) const { return listed ? uint(list[first + index]) : first + index; }
};

struct PairTile {
  int expert;  // -1: the pairs have no expert, and their outputs are zero
  TilePairs pairs;
};

// Product of a threadgroup: the pairs of one expert with its rows from output `first` on.
template <typename W>
struct GemmWork {
  typedef typename W::Element T;

  W weights;
  device const T* x;
  TilePairs pairs;
  Outputs<T> out;
  uint expert;
  uint first;
};

// A tile of moe_bucket, (expert, first position in pair_order, pairs). Without ids, tiles of `most` pairs
// follow each other.
inline PairTile tile_of(device const int4* tiles, device const int* pair_order, bool listed, uint number,
                        uint most, constant MatmulParams& params) {
  int4 tile = int4(0, int(number * most), int(most), 0);
  if (listed) tile = tiles[number];
  const uint first = uint(tile.y), count = min(uint(tile.z), params.pairs - first);
  return {tile.x, {pair_order, first, count, listed}};
}

// Zeros in the outputs from `first` on, `columns` of each pair.
template <typename T>
inline void clear_outputs(device T* out, TilePairs pairs, uint first, uint columns, uint thread_index,
                          uint threads, constant MatmulParams& params) {
  const uint width = min(columns, params.outputs - first);
  for (uint i = thread_index; i < pairs.count * width; i += threads) {
    out[ulong(pairs.at(i / width)) * params.outputs + first + i % width] = T(0.0f);
  }
}
