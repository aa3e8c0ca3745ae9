// Writes keys or values into a cache of 8 bits.
#pragma once
#include "common.h"
#include "geometry/attention.h"
#include "params/write_cache.h"

// Four elements of a key or value a lane, a group in 8, 16 or 32 neighbouring lanes: its lowest and highest
// number, then its codes, each lane's in a word.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kCacheThreads)]] void write_cache_quantized(
    device const T* states [[buffer(0)]], device uint* packed [[buffer(1)]], device T* scales [[buffer(2)]],
    device T* biases [[buffer(3)]], constant CacheWriteParams& params [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]]) {
  const bool exists = thread_index < params.threads;
  const uint index = exists ? thread_index : params.threads - 1;  // all lanes take part in the shuffles
  const uint word = index % params.words, row = index / params.words;
  const uint token = row % params.tokens, head = row / params.tokens % params.heads;
  const uint batch = row / params.tokens / params.heads;
  device const T* source = states + token_start(params.states, batch, token, head) + 4 * word;
  const float4 x = float4(*reinterpret_cast<device const vec<T, 4>*>(source));
  float low = min(min(x.x, x.y), min(x.z, x.w)), high = max(max(x.x, x.y), max(x.z, x.w));
  const float4 zeros = x * 0.0f;
  float not_finite = zeros.x + zeros.y + zeros.z + zeros.w;  // NaN if any number is infinite or NaN
  for (uint distance = 1; distance < params.group_words; distance *= 2) {
    low = min(low, simd_shuffle_xor(low, ushort(distance)));
    high = max(high, simd_shuffle_xor(high, ushort(distance)));
    not_finite += simd_shuffle_xor(not_finite, ushort(distance));
  }
  const T scale = T((high - low) / 254.0f + not_finite);
  uint codes = 0;
  if (float(scale) > 0.0f) {
    const float4 numbers = min(rint((x - low) / float(scale)), 255.0f);
    codes = uint(numbers.x) | uint(numbers.y) << 8 | uint(numbers.z) << 16 | uint(numbers.w) << 24;
  }
  if (!exists) return;
  const uint key = params.start + token;
  packed[token_start(params.packed, batch, key, head) + word] = codes;
  if (word % params.group_words != 0) return;
  const uint group = word / params.group_words;
  const ulong place = token_start(params.groups, batch, key, head) + group;
  scales[place] = scale;
  biases[place] = T(low + not_finite);
}
