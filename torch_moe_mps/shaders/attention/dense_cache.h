// Keys and values in T, as the kernel of attention reads them.
#pragma once
#include "common/packs.h"
#include "params/attention.h"

// Two neighbouring elements as they lie in memory.
inline float2 pair_of(half, uint word) {
  return float2(as_type<half2>(word));
}
inline float2 pair_of(bfloat, uint word) {
  return float2(as_type<float>(word << 16), as_type<float>(word & 0xffff0000u));
}

// The keys or the values of a head in T. A tile's keys are counted from its first, so that 32 bits are
// enough.
template <typename T>
struct DenseCache {
  typedef DenseCache Stored;
  typedef T Element;
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kTiled = false;
  static constant constexpr int kPerWord = 4 / sizeof(T);
  static constant constexpr bool kQuantized = false;
  static constant constexpr int kRunsAtOnce = kPerWord;

  template <int N>
  struct Run {
    Words<N / kPerWord> words;
  };

  device const T* start;
  uint stride, width;
  bool vectorised;

  DenseCache(device const uchar* values, device const T*, device const T*, uint batch, uint head,
             constant CacheParams& params)
      : start(reinterpret_cast<device const T*>(values) + token_start(params.values, batch, 0, head)),
        stride(uint(params.values.token)),
        width(params.width),
        vectorised(params.vectorised != 0) {}

  // Zeros past the end of the head, and for a key that is not used.
  template <int N>
  Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    Run<N> run = {};
    if (!wanted || column >= width) return run;
    device const T* source = start + ulong(tile) * stride + (key * stride + column);
    if (vectorised) {
      run.words = load_words<N / kPerWord>(reinterpret_cast<device const uint*>(source));
      return run;
    }
    // Element by element from the last on, each shifted up by those before it: as a loop, and without an
    // array that is indexed by its counter, which would be in memory.
    ROLLED for (uint i = min(uint(N), width - column); i-- > 0;) {
      UNROLL for (int w = N / kPerWord - 1; w > 0; --w) {
        const uint below = run.words.v[w - 1];
        run.words.v[w] = kPerWord == 1 ? below : run.words.v[w] << 16 | below >> 16;
      }
      if constexpr (kPerWord == 1) {
        run.words.v[0] = as_type<uint>(source[i]);
      } else {
        run.words.v[0] = run.words.v[0] << 16 | as_type<ushort>(source[i]);
      }
    }
    return run;
  }

  // Place of a pair's element in a run.
  static int value_of(int pair, int element) { return 2 * pair + element; }
  template <int N>
  static float2 pair(Run<N> run, int index) {
    if constexpr (kPerWord == 1) {
      return float2(as_type<float>(run.words.v[2 * index]), as_type<float>(run.words.v[2 * index + 1]));
    } else {
      return pair_of(T(0.0f), run.words.v[index]);
    }
  }
};
