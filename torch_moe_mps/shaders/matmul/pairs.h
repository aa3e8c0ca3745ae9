// Pairs of a token and a slot that a kernel computes together.
#pragma once
#include "common.h"

// Some pairs of one expert.
template <int M>
struct PairSet {
  uint v[M];
  uint at(uint index) const {
    uint pair = v[0];
    UNROLL for (int m = 1; m < M; ++m) pair = select(pair, v[m], index == uint(m));
    return pair;
  }
};
