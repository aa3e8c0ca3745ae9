// Adds up what the chunks of the keys have given.
#pragma once
#include "attention/scores.h"
#include "geometry/attention.h"

// A threadgroup takes some columns of a query. Its simdgroups take chunks in turn, and their sums are added
// up by the first simdgroups, in ascending order.
template <typename T, bool kGated>
[[kernel, max_total_threads_per_threadgroup(kMergeSimdgroups* kSimdWidth)]] void attention_merge(
    device float* partials [[buffer(0)]], device const uchar* sinks [[buffer(1)]],
    device const T* gate [[buffer(2)]], device T* output [[buffer(3)]],
    constant AttentionParams& params [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float shared_values[kMergeSimdgroups][kMergeColumns * kSimdWidth];
  threadgroup float shared_sums[kMergeSimdgroups];
  const uint row = group.x, first_column = group.y * kMergeColumns * kSimdWidth;
  Total total = {kLowest, 0.0f};
  for (uint chunk = lane; chunk < params.chunks; chunk += kSimdWidth) {
    total.highest = max(total.highest, partial_total(partials, chunk, row, params)[0]);
  }
  total.highest = simd_max(total.highest);

  float values[kMergeColumns] = {}, sum = 0.0f;
  for (uint first = simdgroup; first < params.chunks; first += kMergeChunks * kMergeSimdgroups) {
    float highest[kMergeChunks], sums[kMergeChunks], of_chunk[kMergeChunks][kMergeColumns];
    UNROLL for (uint i = 0; i < kMergeChunks; ++i) {
      const uint chunk = first + i * kMergeSimdgroups;
      highest[i] = -INFINITY;
      sums[i] = 0.0f;
      UNROLL for (uint c = 0; c < kMergeColumns; ++c) of_chunk[i][c] = 0.0f;
      if (chunk >= params.chunks) continue;
      highest[i] = partial_total(partials, chunk, row, params)[0];
      sums[i] = partial_total(partials, chunk, row, params)[1];
      device const float* source = partial_values(partials, chunk, row, params) + first_column;
      UNROLL for (uint c = 0; c < kMergeColumns; ++c) {
        const uint column = c * kSimdWidth + lane;
        if (first_column + column < params.v.width) of_chunk[i][c] = source[column];
      }
    }
    UNROLL for (uint i = 0; i < kMergeChunks; ++i) {
      const float factor = exponential(highest[i] - total.highest);
      sum = fma(factor, sums[i], sum);
      UNROLL for (uint c = 0; c < kMergeColumns; ++c) values[c] = fma(factor, of_chunk[i][c], values[c]);
    }
  }
  UNROLL for (uint c = 0; c < kMergeColumns; ++c) shared_values[simdgroup][c * kSimdWidth + lane] = values[c];
  if (lane == 0) shared_sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint column = first_column + thread_index;
  if (thread_index >= kMergeColumns * kSimdWidth || column >= params.v.width) return;
  float value = 0.0f;
  UNROLL for (uint s = 0; s < kMergeSimdgroups; ++s) {
    total.sum += shared_sums[s];
    value += shared_values[s][thread_index];
  }
  const float factor = final_factor(total, sinks, row % params.heads, params);
  if constexpr (kGated) value *= gate_factor(gate, row, column, params);
  store_result(output, ulong(row) * params.v.width + column, value * factor, params);
}
