// Keys or values of which each adds to its score by its distance from the token.
#pragma once
#include "common.h"
#include "params/attention.h"

template <typename C>
struct Relative {
  typedef C Stored;
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kRelative = true;

  C all;

  Relative(device const uchar* values, device const typename C::Element* scales,
           device const typename C::Element* biases, uint batch, uint head, constant CacheParams& params)
      : all(values, scales, biases, batch, head, params) {}

  template <int N>
  typename C::template Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    return all.template load<N>(tile, key, column, wanted);
  }
};
