// Keys or values of which one token sees all that it is given.
#pragma once
#include "common.h"
#include "params/attention.h"

template <typename C>
struct Whole {
  typedef C Stored;
  static constant constexpr bool kSelects = true;
  static constant constexpr bool kTiled = false;

  C all;

  Whole(device const uchar* values, device const typename C::Element* scales,
        device const typename C::Element* biases, uint batch, uint head, constant CacheParams& params)
      : all(values, scales, biases, batch, head, params) {}

  void select(device const int*, uint, constant AttentionParams&) {}
  bool has(uint) const { return true; }
  template <int N>
  typename C::template Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    return all.template load<N>(tile, key, column, wanted);
  }
};
