// Quantises tiles of a cache to 4 or 2 bits.
#pragma once
#include "common.h"
#include "geometry/tiles.h"
#include "params/attention.h"
// Behind it.
#include "params/tiles.h"

// The elements of a head of a tile, each divided by its token's factor. A factor that is not finite makes all
// of a token's elements NaN.
template <typename T>
struct TileStates {
  device const T* start;
  ulong stride;
  threadgroup const float* factors;

  float element(uint token, uint column) const {
    const float factor = factors[token];
    return float(start[token * stride + column]) / factor + factor * 0.0f;
  }
};

// A threadgroup takes a tile of a head: the factors of its tokens, a simdgroup each, then the numbers of its
// channels, a thread each, then its codes, a word each.
template <typename T, int kBits>
[[kernel, max_total_threads_per_threadgroup(kSealThreads)]] void seal_tiles(
    device const T* states [[buffer(0)]], device uint* tiles [[buffer(1)]],
    constant SealParams& params [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES) {
  constexpr uint kMost = (1u << kBits) - 1, kCodes = 32 / kBits;
  threadgroup float factors[kTileTokens], scales[kMostTileWidth], zeros[kMostTileWidth];
  const uint width = params.tiles.width, head = group.y, batch = group.z;
  device uint* tile = tiles + token_start(params.tiles.tiles, batch, params.start + group.x, head);
  device T* numbers = reinterpret_cast<device T*>(tile + params.tiles.numbers);
  const TileStates<T> source = {states + token_start(params.states, batch, group.x * kTileTokens, head),
                                params.states.token, factors};

  for (uint token = simdgroup; token < kTileTokens; token += kSealThreads / kSimdWidth) {
    T factor = T(1.0f);
    if (params.tiles.has_factors != 0) {
      float sum = 0.0f;
      for (uint column = lane; column < width; column += kSimdWidth) {
        const float x = float(source.start[token * source.stride + column]);
        sum = fma(x, x, sum);
      }
      factor = T(precise::sqrt(simd_sum(sum) / float(width)));
      if (float(factor) == 0.0f) factor = T(1.0f);
      if (lane == 0) numbers[2 * width + token] = factor;
    }
    if (lane == 0) factors[token] = float(factor);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint column = thread_index; column < width; column += kSealThreads) {
    float low = INFINITY, high = -INFINITY, not_finite = 0.0f;  // NaN if any number is infinite or NaN
    for (uint token = 0; token < kTileTokens; ++token) {
      const float x = source.element(token, column);
      low = min(low, x);
      high = max(high, x);
      not_finite += x * 0.0f;
    }
    const T scale = T((high - low) / float(kMost) + not_finite), zero = T(low + not_finite);
    numbers[column] = scale;
    numbers[width + column] = zero;
    scales[column] = float(scale);
    zeros[column] = float(zero);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint row_words = width / kCodes;
  for (uint index = thread_index; index < kTileTokens * row_words; index += kSealThreads) {
    const uint token = index / row_words, first = index % row_words * kCodes;
    uint word = 0;
    UNROLL for (uint i = 0; i < kCodes; ++i) {
      const float scale = scales[first + i];
      if (!(scale > 0.0f)) continue;
      const float code = rint((source.element(token, first + i) - zeros[first + i]) / scale);
      word |= uint(clamp(code, 0.0f, float(kMost))) << (kBits * i);
    }
    tile[index] = word;
  }
}
