// Keys and values as the kernel of attention reads them: where they lie, in which format, which of them
// count.
#pragma once
#include "common.h"
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
  static constant constexpr bool kRelative = false;
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
      : start(reinterpret_cast<device const T*>(values) + batch * params.batch_stride +
              head * params.head_stride),
        stride(params.key_stride),
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
    UNROLL for (int i = 0; i < N; ++i) {
      if (column + i >= width) break;
      if constexpr (kPerWord == 1) {
        run.words.v[i] = as_type<uint>(source[i]);
      } else {
        run.words.v[i / 2] |= uint(as_type<ushort>(source[i])) << (16 * (i % 2));
      }
    }
    return run;
  }

  // Which value of a run a pair's element is.
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

// The same in codes of 8 bits, with a scale and a bias in T for each group.
template <typename T>
struct QuantizedCache {
  typedef QuantizedCache Stored;
  typedef T Element;
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kRelative = false;
  static constant constexpr bool kQuantized = true;
  static constant constexpr int kRunsAtOnce = 2;

  template <int N>
  struct Run {
    Words<N / 4> words;
    T scale, bias;
  };

  device const uchar* start;
  device const T* scales;
  device const T* biases;
  uint stride, scales_stride, width, group_shift;

  QuantizedCache(device const uchar* values, device const T* scales_, device const T* biases_, uint batch,
                 uint head, constant CacheParams& params)
      : start(values + 4 * (batch * params.batch_stride + head * params.head_stride)),
        stride(4 * params.key_stride),
        scales_stride(params.scales_key_stride),
        width(params.width),
        group_shift(params.group_shift) {
    const ulong first = batch * params.scales_batch_stride + head * params.scales_head_stride;
    scales = scales_ + first;
    biases = biases_ + first;
  }

  template <int N>
  Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    Run<N> run = {};
    if (!wanted || column >= width) return run;
    device const uchar* source = start + ulong(tile) * stride + (key * stride + column);
    run.words = load_words<N / 4>(reinterpret_cast<device const uint*>(source));
    const uint group = key * scales_stride + (column >> group_shift);
    run.scale = (scales + ulong(tile) * scales_stride)[group];
    run.bias = (biases + ulong(tile) * scales_stride)[group];
    return run;
  }

  // Two codes 16 bits apart become the mantissas of two halves, which takes no conversion from integers.
  static int value_of(int pair, int element) { return 4 * (pair / 2) + pair % 2 + 2 * element; }
  template <int N>
  static float2 pair(Run<N> run, int index) {
    const uint codes = (run.words.v[index / 2] >> (8 * (index % 2))) & 0x00ff00ffu;
    half2 numbers = as_type<half2>(codes | 0x64006400u);
    const float scale = float(run.scale);
    float bias = float(run.bias);
    if constexpr (sizeof(T) == 4) {
      numbers -= half2(1024.0h);
    } else {
      bias = fma(-1024.0f, scale, bias);  // rounded by far less than 16 bits are
    }
    return float2(fma(float(numbers.x), scale, bias), fma(float(numbers.y), scale, bias));
  }
};

// What reads keys or values of a cache in another way has the cache, which says how they are stored: Metal
// has no derived classes.

// Keys or values of which indices select some: key i of a tile is that of an index.
template <typename C>
struct Selected {
  typedef C Stored;
  static constant constexpr bool kSelects = true;
  static constant constexpr bool kRelative = false;

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

// Keys or values of which one token sees all that it is given.
template <typename C>
struct Whole {
  typedef C Stored;
  static constant constexpr bool kSelects = true;
  static constant constexpr bool kRelative = false;

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

// Keys or values of a window and of a tail. The slots of a token are keys of the tail, those of indices or
// all, and behind them its own key and what lies before it. The tail is in place of the scales.
template <typename C>
struct Tailed {
  typedef C Stored;
  typedef typename C::Element T;
  static constant constexpr bool kSelects = true;
  static constant constexpr bool kRelative = false;

  C window;
  device const T* tail;
  device const int* indices;
  uint tail_stride, slots, limit;
  int own;
  bool selects;

  Tailed(device const uchar* values, device const T* tail_, device const T*, uint batch, uint head,
         constant CacheParams& params)
      : window(values, tail_, tail_, batch, head, params),
        tail(tail_ + batch * params.scales_batch_stride + head * params.scales_head_stride),
        tail_stride(params.scales_key_stride) {}

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

// Keys or values of which each adds to its score by its distance from the token.
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
