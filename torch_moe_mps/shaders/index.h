// The keys that sparse attention reads: scores of an indexer, and the best of them.
#pragma once
#include "common/counting.h"
#include "common/dtypes.h"
#include "common/simdgroups.h"
#include "common/sums.h"
#include "common/vectors.h"
#include "geometry/index.h"
#include "params/index.h"

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

// The blocks that have scores: all with a key in the range, or those that are complete.
inline KeyRange blocks_of(KeyRange keys, constant IndexParams& params) {
  if (keys.count() == 0) return {0, 0};
  if (params.is_pooled != 0) return {0, keys.end / params.block};
  return {keys.begin / params.block, (keys.end - 1) / params.block + 1};
}

template <typename T>
inline float4 four_of_key(device const T* key, uint column, uint width, bool vectorised) {
  if (vectorised) return widen(load<4>(key + column));
  float4 values = 0.0f;
  for (uint i = 0; i < 4 && column + i < width; ++i) values[i] = widen(key[column + i]);
  return values;
}

// Up to `count` heads' queries, from one head on, in `staged`; zeros in place of heads that there are not.
template <typename T>
inline void stage_queries(device const T* queries, uint head, uint count, threadgroup float4* staged,
                          uint thread_index, constant IndexParams& params) {
  const uint fours = (params.width + 3) / 4;
  for (uint i = thread_index; i < count * fours; i += kIndexThreads) {
    const uint of_head = head + i / fours, column = 4 * (i % fours);
    float4 values = 0.0f;
    if (of_head < params.heads) {
      device const T* query = queries + of_head * params.q.head;
      for (uint j = 0; j < 4 && column + j < params.width; ++j) values[j] = widen(query[column + j]);
    }
    staged[i] = values;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A thread takes two rows of keys and reads them once for as many heads as `staged` holds; all threads have
// the same queries, which two keys share: 1.65 slots a product (cost model), and 2.03 for one key of a
// thread.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kIndexThreads)]] void index_scores(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const uchar* weights [[buffer(2)]], device const int* key_range [[buffer(3)]],
    device float* scores [[buffer(4)]], constant IndexParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kKeys = kIndexKeys / kIndexThreads;
  threadgroup float4 staged[kIndexHeads * kIndexWidth / 4];
  const uint batch = group.z, token = params.first_token + group.y, first = group.x * kIndexKeys;
  const KeyRange range = blocks_of(keys_of(key_range, batch, token, params), params);
  if (first >= range.end || first + kIndexKeys <= range.begin || range.count() <= params.chosen) return;
  device const T* starts[kKeys];
  float totals[kKeys];
  UNROLL for (uint i = 0; i < kKeys; ++i) {
    const uint key = min(first + i * kIndexThreads + thread_index, params.rows - 1);
    starts[i] = k + token_start(params.k, batch, key, 0);
    totals[i] = 0.0f;
  }
  device const T* queries = q + token_start(params.q, batch, token, 0);
  const ulong weights_start = token_start(params.weights, batch, token, 0);
  const uint fours = (params.width + 3) / 4;
  for (uint head = 0; head < params.heads; head += kIndexHeads) {
    const uint heads = min(params.heads - head, kIndexHeads);
    stage_queries(queries, head, kIndexHeads, staged, thread_index, params);
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
        const bool weighted = params.has_weights != 0;
        const float weight =
            weighted ? load_one(weights, params.weights_dtype, weights_start + head + j) : 1.0f;
        UNROLL for (uint i = 0; i < kKeys; ++i) {
          const float product = sums[i][j] * params.scale;
          totals[i] += weight * (product < 0.0f ? 0.0f : product);  // NaN stays
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  device float* row = scores + (ulong(batch) * params.tokens_at_once + group.y) * params.rows;
  UNROLL for (uint i = 0; i < kKeys; ++i) {
    const uint key = first + i * kIndexThreads + thread_index;
    if (key >= range.begin && key < range.end) row[key] = isnan(totals[i]) ? -FLT_MAX : totals[i];
  }
}

// A simdgroup takes a block of keys, whose highest score for each head is the block's. Blocks that are chosen
// whatever their score have the highest.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kIndexThreads)]] void index_block_scores(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const int* key_range [[buffer(2)]], device float* scores [[buffer(3)]],
    constant IndexParams& params [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float4 staged[kBlockHeads * kIndexWidth / 4];
  const uint batch = group.z, token = params.first_token + group.y, first = group.x * kIndexSimdgroups;
  const KeyRange keys = keys_of(key_range, batch, token, params);
  const KeyRange range = blocks_of(keys, params);
  if (first >= range.end || first + kIndexSimdgroups <= range.begin || range.count() <= params.chosen) return;
  const uint block = first + simdgroup;
  const bool is_scored = block >= range.begin && block < range.end;
  const bool is_own = is_scored && range.end - block <= params.tail;
  const uint begin = max(block * params.block, keys.begin);
  const uint end = is_scored ? min((block + 1) * params.block, keys.end) : begin;
  device const T* queries = q + token_start(params.q, batch, token, 0);
  const uint fours = (params.width + 3) / 4;
  for (uint head = 0; head < params.heads; head += kBlockHeads) {
    stage_queries(queries, head, kBlockHeads, staged, thread_index, params);
    float best[kBlockHeads];
    UNROLL for (uint j = 0; j < kBlockHeads; ++j) best[j] = -INFINITY;
    for (uint key = begin + lane; key < end; key += kSimdWidth) {
      device const T* start = k + token_start(params.k, batch, key, 0);
      float sums[kBlockHeads];
      UNROLL for (uint j = 0; j < kBlockHeads; ++j) sums[j] = 0.0f;
      for (uint four = 0; four < fours; ++four) {
        const float4 values = four_of_key(start, 4 * four, params.width, params.vectorised != 0);
        UNROLL for (uint j = 0; j < kBlockHeads; ++j) {
          sums[j] = add_dot(sums[j], staged[j * fours + four], values);
        }
      }
      UNROLL for (uint j = 0; j < kBlockHeads; ++j) {
        const float score = sums[j] * params.scale;
        best[j] = max(best[j], isnan(score) ? -FLT_MAX : score);
      }
    }
    UNROLL for (uint j = 0; j < kBlockHeads; ++j) {
      const float highest = simd_max(best[j]);
      if (lane == 0 && is_scored && head + j < params.heads) {
        const ulong row = (ulong(batch) * params.groups + head + j) * params.tokens_at_once + group.y;
        scores[row * params.rows + block] = is_own ? INFINITY : highest;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// A threadgroup takes a token, and one of the heads that choose for themselves. It finds the bits of the
// lowest score that is chosen from the highest down, by counting the scores that agree in the bits before:
// 11, 11 and 10 at a time. Then it writes the blocks in ascending order, or the bits of their keys. Counters
// are integers: the result does not depend on the order of the atomics.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSelectThreads)]] void index_select(
    device const float* scores [[buffer(0)]], device const int* key_range [[buffer(1)]],
    device int* indices [[buffer(2)]], constant IndexParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup uint counts[kSelectBins];
  threadgroup uint partials[kMaxSimdgroups];
  threadgroup uint found[2];  // the bin of the lowest score that is chosen, and the scores above it
  const uint batch = group.z, token = params.first_token + group.x;
  const KeyRange keys = keys_of(key_range, batch, token, params);
  const KeyRange range = blocks_of(keys, params);
  const ulong choice = ulong(batch) * params.groups + group.y;
  device int* chosen = indices + (choice * params.tokens + token) * params.slots;
  device const float* row = scores + (choice * params.tokens_at_once + group.x) * params.rows;
  const bool takes_all = range.count() <= params.chosen;
  uint lowest = 0, known = 0, wanted = params.chosen;
  for (uint round = 0; round < 3 && !takes_all; ++round) {
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
  for (uint start = range.begin; start < range.end && !takes_all; start += kSelectThreads) {
    const uint key = start + thread_index;
    const uint number = key < range.end ? in_order(row[key]) : 0;
    const uint is_above = number > lowest ? 1 : 0, is_equal = key < range.end && number == lowest ? 1 : 0;
    const Sums sums = sums_of_threads(is_above | is_equal << 16, partials, lane, simdgroup);
    const uint above_before = above + (sums.before & 0xffff), equal_before = equal + (sums.before >> 16);
    if (is_equal != 0 && equal_before + 1 == wanted) found[0] = key;
    if (params.as_bits == 0 && (is_above != 0 || (is_equal != 0 && equal_before < wanted))) {
      chosen[above_before + min(equal_before, wanted)] = int(key);
    }
    above += sums.all & 0xffff;
    equal += sums.all >> 16;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const bool has_open = params.is_pooled != 0 && params.tail != 0;
  if (params.as_bits == 0) {
    const bool is_open = has_open && keys.end % params.block != 0;
    const uint count = min(range.count(), params.chosen);
    for (uint i = (takes_all ? 0 : count) + thread_index; i < params.slots; i += kSelectThreads) {
      const uint block = i < count ? range.begin + i : range.end;
      chosen[i] = i < count + (is_open ? 1 : 0) ? int(block) : -1;
    }
    return;
  }
  const uint last_equal = takes_all ? 0 : found[0];
  for (uint word = simdgroup; word < params.slots; word += kSelectThreads / kSimdWidth) {
    const uint key = kSimdWidth * word + lane, block = key / params.block;
    bool is_chosen = key >= keys.begin && key < keys.end;
    if (is_chosen && block >= range.end) {
      is_chosen = has_open;
    } else if (is_chosen && !takes_all) {
      const uint number = in_order(row[block]);
      is_chosen = number > lowest || (number == lowest && block <= last_equal);
    }
    const uint bits = ballot(is_chosen);
    if (lane == 0) chosen[word] = int(bits);
  }
}
