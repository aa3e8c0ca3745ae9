// Keys or values of a window and of a tail. The slots of a token are keys of the tail, those of indices or
// all, and behind them its own key and what lies before it.
#pragma once
#include "common.h"
#include "params/attention.h"

template <typename C>
struct Tailed {
  typedef C Stored;
  typedef typename C::Element T;
  static constant constexpr bool kSelects = true;
  static constant constexpr bool kTiled = false;

  C window;
  device const T* tail;
  device const int* indices;
  uint tail_stride, slots, limit;
  int own;
  bool selects;

  Tailed(device const uchar* values, device const T* tail_, device const T*, uint batch, uint head,
         constant CacheParams& params)
      : window(values, tail_, tail_, batch, head, params),
        tail(tail_ + token_start(params.tail, batch, 0, head)),
        tail_stride(uint(params.tail.token)) {}

  void select(device const int* indices_, uint token, constant AttentionParams& params) {
    indices = indices_;
    selects = params.index_block != 0;
    slots = params.tail_slots;
    limit = min(params.tail_keys, (params.position + token + 1) / params.tail_rate);
    own = int(params.indexed_keys) - int(params.tokens) + int(token);
  }

  uint row(uint slot) const { return selects ? uint(indices[slot]) : slot; }
  bool has(uint slot) const { return slot < slots ? row(slot) < limit : int(slot - slots) <= own; }

  template <int N>
  typename C::template Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    const uint slot = tile + key;
    C from = window;
    if (slot < slots) {
      from.start = tail;
      from.stride = tail_stride;
    }
    const uint found = !wanted ? 0 : slot < slots ? row(slot) : uint(own) - (slot - slots);
    return from.template load<N>(found, 0, column, wanted);
  }
};
