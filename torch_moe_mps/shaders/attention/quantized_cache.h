// Keys and values in 8 bits, as the kernel of attention reads them.
#pragma once
#include "common/packs.h"
#include "params/attention.h"

// The keys or the values of a head in codes of 8 bits, with a scale and a bias in T for each group.
template <typename T>
struct QuantizedCache {
  typedef QuantizedCache Stored;
  typedef T Element;
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kTiled = false;
  static constant constexpr bool kQuantized = true;
  static constant constexpr int kRunsAtOnce = 2;

  template <int N>
  struct Run {
    Words<N / 4> words;
    T scale, bias;
  };

  device const uchar* start;
  device const T* scales;  // of all heads, as the biases: the same place in both takes a register, not four
  device const T* biases;
  uint first_group;  // of the head
  uint stride, scales_stride, width, group_shift;

  QuantizedCache(device const uchar* values, device const T* scales_, device const T* biases_, uint batch,
                 uint head, constant CacheParams& params)
      : start(values + 4 * token_start(params.values, batch, 0, head)),
        scales(scales_),
        biases(biases_),
        first_group(uint(token_start(params.scales, batch, 0, head))),
        stride(4 * uint(params.values.token)),
        scales_stride(uint(params.scales.token)),
        width(params.width),
        group_shift(params.group_shift) {}

  template <int N>
  Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    Run<N> run = {};
    if (!wanted || column >= width) return run;
    device const uchar* source = start + ulong(tile) * stride + (key * stride + column);
    run.words = load_words<N / 4>(reinterpret_cast<device const uint*>(source));
    const uint group = first_group + (tile + key) * scales_stride + (column >> group_shift);
    run.scale = scales[group];
    run.bias = biases[group];
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
