// Keys or values of which indices select some: key i of a tile is that of an index.
#pragma once
#include "common.h"
#include "params/attention.h"

template <typename C>
struct Selected {
  typedef C Stored;
  static constant constexpr bool kSelects = true;
  static constant constexpr bool kTiled = false;

  C all;
  device const int* indices;
  uint block, stored;  // keys of an index, and of the cache

  Selected(device const uchar* values, device const typename C::Element* scales,
           device const typename C::Element* biases, uint batch, uint head, constant CacheParams& params)
      : all(values, scales, biases, batch, head, params) {}

  void select(device const int* indices_, uint, constant AttentionParams& params) {
    indices = indices_;
    block = params.index_block;
    stored = params.indexed_keys;
  }

  // The key of the cache; `stored` or more if an index is none.
  uint row(uint key) const {
    if (block == 1) return uint(indices[key]);
    const int index = indices[key / block];
    const ulong found = ulong(uint(index)) * block + key % block;
    return index < 0 || found >= stored ? stored : uint(found);
  }
  bool has(uint key) const { return row(key) < stored; }

  template <int N>
  typename C::template Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    return all.template load<N>(wanted ? row(tile + key) : 0, 0, column, wanted);
  }
};
