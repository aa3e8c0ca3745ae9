// The keys that sparse attention reads: scores of an indexer, and the best of them.
#pragma once
#include "common.h"

struct KeyRange {
  uint begin;
  uint end;

  uint count() const { return end > begin ? end - begin : 0; }
};

// The keys that a token may choose.
inline KeyRange keys_of(device const int* key_range, uint batch, uint token, constant IndexParams& params) {
  // With fewer keys than tokens, the first tokens have none.
  KeyRange range = {0, uint(max(int(params.keys) - int(params.tokens) + int(token) + 1, 0))};
  if (params.has_key_range != 0) {
    range.begin = uint(max(key_range[2 * batch], 0));
    range.end = uint(clamp(key_range[2 * batch + 1], 0, int(range.end)));
  }
  return range;
}

template <typename T>
inline float4 four_of_key(device const T* key, uint column, uint width, bool vectorised) {
  if (vectorised) return widen(load<4>(key + column));
  float4 values = 0.0f;
  for (uint i = 0; i < 4 && column + i < width; ++i) values[i] = widen(key[column + i]);
  return values;
}

// A thread takes two keys and reads them once for as many heads as `staged` holds; all threads have the same
// queries, which two keys share: 1.65 slots a product (cost model), and 2.03 for one key of a thread.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kIndexThreads)]] void index_scores(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const uchar* weights [[buffer(2)]], device const int* key_range [[buffer(3)]],
    device float* scores [[buffer(4)]], constant IndexParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kKeys = kIndexKeys / kIndexThreads;
  threadgroup float4 staged[kIndexHeads * kIndexWidth / 4];
  const uint batch = group.z, token = params.first_token + group.y, first = group.x * kIndexKeys;
  const KeyRange range = keys_of(key_range, batch, token, params);
  if (first >= range.end || first + kIndexKeys <= range.begin || range.count() <= params.chosen) return;
  device const T* starts[kKeys];
  float totals[kKeys];
  UNROLL for (uint i = 0; i < kKeys; ++i) {
    const uint key = min(first + i * kIndexThreads + thread_index, params.keys - 1);
    starts[i] = k + batch * params.k_batch_stride + key * params.k_key_stride;
    totals[i] = 0.0f;
  }
  device const T* queries = q + batch * params.q_batch_stride + token * params.q_token_stride;
  const ulong weights_start = batch * params.weights_batch_stride + token * params.weights_token_stride;
  const uint fours = (params.width + 3) / 4;
  for (uint head = 0; head < params.heads; head += kIndexHeads) {
    const uint heads = min(params.heads - head, kIndexHeads);
    for (uint i = thread_index; i < kIndexHeads * fours; i += kIndexThreads) {
      const uint of_four = i / fours, column = 4 * (i % fours);
      float4 values = 0.0f;
      if (of_four < heads) {
        device const T* query = queries + (head + of_four) * params.q_head_stride;
        for (uint j = 0; j < 4 && column + j < params.width; ++j) values[j] = widen(query[column + j]);
      }
      staged[i] = values;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sums[kKeys][kIndexHeads];
    UNROLL for (uint i = 0; i < kKeys; ++i) {
      UNROLL for (uint j = 0; j < kIndexHeads; ++j) sums[i][j] = 0.0f;
    }
    for (uint four = 0; four < fours; ++four) {
      float4 keys[kKeys];
      UNROLL for (uint i = 0; i < kKeys; ++i) {
        keys[i] = four_of_key(starts[i], 4 * four, params.width, params.vectorised != 0);
      }
      UNROLL for (uint j = 0; j < kIndexHeads; ++j) {
        const float4 query = staged[j * fours + four];
        UNROLL for (uint i = 0; i < kKeys; ++i) sums[i][j] = add_dot(sums[i][j], query, keys[i]);
      }
    }
    UNROLL for (uint j = 0; j < kIndexHeads; ++j) {
      if (j < heads) {
        const float weight = load_one(weights, params.weights_dtype, weights_start + head + j);
        UNROLL for (uint i = 0; i < kKeys; ++i) {
          const float product = sums[i][j] * params.scale;
          totals[i] += weight * (product < 0.0f ? 0.0f : product);  // NaN stays
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  device float* row = scores + (ulong(batch) * params.tokens_at_once + group.y) * params.keys;
  UNROLL for (uint i = 0; i < kKeys; ++i) {
    const uint key = first + i * kIndexThreads + thread_index;
    if (key >= range.begin && key < range.end) row[key] = isnan(totals[i]) ? -FLT_MAX : totals[i];
  }
}

// Numbers whose order is that of the scores.
inline uint in_order(float score) {
  const uint bits = as_type<uint>(score);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// The sum of the threads' values in front of this one, and of all. `partials` must not be in use.
struct Sums {
  uint before;
  uint all;
};
inline Sums sums_of_threads(uint value, threadgroup uint* partials, uint lane, uint simdgroup) {
  const uint before = simd_prefix_exclusive_sum(value);
  const uint total = simd_sum(value);
  if (lane == 0) partials[simdgroup] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint partial = partials[lane];
  return {before + simd_sum(lane < simdgroup ? partial : 0), simd_sum(partial)};
}

// A threadgroup takes a token. It finds the bits of the lowest score that is chosen from the highest down, by
// counting the scores that agree in the bits before: 11, 11 and 10 at a time. Then it writes the keys in
// ascending order. Counters are integers: the result does not depend on the order of the atomics.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSelectThreads)]] void index_select(
    device const float* scores [[buffer(0)]], device const int* key_range [[buffer(1)]],
    device int* indices [[buffer(2)]], constant IndexParams& params [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint counts[kSelectBins];
  threadgroup uint partials[kMaxSimdgroups];
  threadgroup uint found[2];  // the bin of the lowest score that is chosen, and the scores above it
  const uint batch = group.y, token = params.first_token + group.x;
  const KeyRange range = keys_of(key_range, batch, token, params);
  device int* chosen = indices + (ulong(batch) * params.tokens + token) * params.chosen;
  if (range.count() <= params.chosen) {
    for (uint i = thread_index; i < params.chosen; i += kSelectThreads) {
      chosen[i] = i < range.count() ? int(range.begin + i) : -1;
    }
    return;
  }
  device const float* row = scores + (ulong(batch) * params.tokens_at_once + group.x) * params.keys;
  uint lowest = 0, known = 0, wanted = params.chosen;
  for (uint round = 0; round < 3; ++round) {
    const uint shift = round == 0 ? 21 : round == 1 ? 10 : 0;
    const uint digits = round == 2 ? 0x3ff : 0x7ff;
    for (uint i = thread_index; i < kSelectBins; i += kSelectThreads) counts[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint key = range.begin + thread_index; key < range.end; key += kSelectThreads) {
      const uint number = in_order(row[key]);
      if ((number & known) == lowest) {
        threadgroup uint* counter = counts + (number >> shift & digits);
        atomic_fetch_add_explicit(reinterpret_cast<threadgroup atomic_uint*>(counter), 1u,
                                  memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A thread takes two bins; the first thread takes the highest.
    const uint high = kSelectBins - 1 - 2 * thread_index;
    const uint of_high = counts[high], of_low = counts[high - 1];
    const uint before = sums_of_threads(of_high + of_low, partials, lane, simdgroup).before;
    if (before < wanted && wanted <= before + of_high + of_low) {
      const bool is_high = wanted <= before + of_high;
      found[0] = is_high ? high : high - 1;
      found[1] = is_high ? before : before + of_high;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    lowest |= found[0] << shift;
    known |= digits << shift;
    wanted -= found[1];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // All scores above the lowest are chosen, and of those that equal it the first `wanted`.
  uint above = 0, equal = 0;
  for (uint start = range.begin; start < range.end; start += kSelectThreads) {
    const uint key = start + thread_index;
    const uint number = key < range.end ? in_order(row[key]) : 0;
    const uint is_above = number > lowest ? 1 : 0, is_equal = key < range.end && number == lowest ? 1 : 0;
    const Sums sums = sums_of_threads(is_above | is_equal << 16, partials, lane, simdgroup);
    const uint above_before = above + (sums.before & 0xffff), equal_before = equal + (sums.before >> 16);
    if (is_above != 0 || (is_equal != 0 && equal_before < wanted)) {
      chosen[above_before + min(equal_before, wanted)] = int(key);
    }
    above += sums.all & 0xffff;
    equal += sums.all >> 16;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
