// Neighbouring elements in registers: floats, or words as they lie in memory.
#pragma once
#include "common.h"

// N floats that kernels use one at a time.
template <int N>
struct Pack {
  float v[N];
};

template <int kWords>
struct Words {
  uint v[kWords];
};

// Loads of 16 or 8 bytes where the number of words allows them: `source` is a multiple of that.
template <int kWords>
inline Words<kWords> load_words(device const uint* source) {
  Words<kWords> words;
  if constexpr (kWords % 4 == 0) {
    UNROLL for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = reinterpret_cast<device const uint4*>(source)[i];
      UNROLL for (int j = 0; j < 4; ++j) words.v[4 * i + j] = four[j];
    }
  } else if constexpr (kWords % 2 == 0) {
    UNROLL for (int i = 0; i < kWords / 2; ++i) {
      const uint2 two = reinterpret_cast<device const uint2*>(source)[i];
      words.v[2 * i] = two.x;
      words.v[2 * i + 1] = two.y;
    }
  } else {
    UNROLL for (int i = 0; i < kWords; ++i) words.v[i] = source[i];
  }
  return words;
}
