// Attention of few queries over many keys. A threadgroup takes a chunk of the keys and some queries of one
// key head, so that a key is read once for all of them. The simdgroups take turns at tiles of 32 keys. A row
// of k or v is held by kLanes lanes, 8 elements each; a simdgroup consists of several such pieces, and each
// piece walks over kLanes keys of the tile. In the end lane i has the score of key i, so a tile needs one
// maximum, one exponential and one rescaling.
#pragma once
#include "common.h"

// The loop over the keys of a tile is not unrolled: all its loads would be in flight at once, which takes too
// many registers.
#define ROLLED _Pragma("clang loop unroll(disable)")

constant constexpr float kLowest = -3.402823466e38f;

// The elements of a row that one lane holds.
template <typename T>
struct Elements {
  Vector<T, 4> low;
  Vector<T, 4> high;
};

struct Row {
  uint first;  // the lane's first element
  uint width;
  bool vectorised;
};

// Loads zeros past the end of the row, and for a row that is not wanted.
template <typename T>
inline Elements<T> load_elements(device const T* source, Row row, bool wanted) {
  Elements<T> x;
  x.low = vec<T, 4>(T(0.0f));
  x.high = vec<T, 4>(T(0.0f));
  if (!wanted || row.first >= row.width) return x;
  if (row.vectorised) {
    x.low = load<4>(source + row.first);
    x.high = load<4>(source + row.first + 4);
    return x;
  }
  UNROLL for (uint i = 0; i < 4; ++i) {
    if (row.first + i < row.width) x.low[i] = source[row.first + i];
    if (row.first + 4 + i < row.width) x.high[i] = source[row.first + 4 + i];
  }
  return x;
}

struct Wide {
  float4 low;
  float4 high;
};

template <typename T>
inline Wide widen(Elements<T> x) {
  return {widen(x.low), widen(x.high)};
}

inline float dot(Wide a, Wide b) {
  float sum = 0.0f;
  UNROLL for (int i = 0; i < 4; ++i) sum += a.low[i] * b.low[i];
  UNROLL for (int i = 0; i < 4; ++i) sum += a.high[i] * b.high[i];
  return sum;
}

inline Wide scaled(Wide x, float factor) {
  UNROLL for (int i = 0; i < 4; ++i) {
    x.low[i] *= factor;
    x.high[i] *= factor;
  }
  return x;
}

inline Wide with_added(Wide sum, float factor, Wide x) {
  UNROLL for (int i = 0; i < 4; ++i) {
    sum.low[i] += factor * x.low[i];
    sum.high[i] += factor * x.high[i];
  }
  return sum;
}

// The sum over the pieces of a simdgroup: over lanes that are kLanes apart.
template <int kLanes>
inline float sum_of_pieces(float x) {
  UNROLL for (ushort apart = kLanes; apart < kSimdWidth; apart *= 2) x += simd_shuffle_xor(x, apart);
  return x;
}

template <int kLanes>
inline float sum_of_piece(float x) {
  UNROLL for (ushort apart = kLanes / 2; apart > 0; apart /= 2) x += simd_shuffle_xor(x, apart);
  return x;
}

inline float lowest_of(uint dtype) {
  return dtype == DTYPE_FLOAT ? kLowest : dtype == DTYPE_HALF ? -65504.0f : -3.3895313892515355e38f;
}

// What the mask adds to the score of a key: -INFINITY for a key that the token does not see.
inline float bias_of(device const uchar* mask, ulong start, uint token, uint key,
                     constant AttentionParams& params) {
  if (params.mask_kind == MASK_NONE) {
    const int distance = int(params.keys) - int(params.tokens) + int(token) - int(key);
    const bool seen = distance >= 0 && (params.window == 0 || distance < int(params.window));
    return seen ? 0.0f : -INFINITY;
  }
  const ulong index = start + ulong(token) * params.mask_token_stride + ulong(key) * params.mask_key_stride;
  if (params.mask_kind == MASK_BOOL) return mask[index] != 0 ? 0.0f : -INFINITY;
  const float bias = load_one(mask, params.mask_dtype, index);
  return bias <= lowest_of(params.mask_dtype) ? -INFINITY : bias;
}

// The state of a softmax: the highest score so far, and the sum and the weighted values relative to it.
template <int kQueries>
struct Softmax {
  float highest[kQueries];
  float sum[kQueries];  // over the keys of this lane
  Wide values[kQueries];
};

// Which queries, keys and elements a thread works on.
struct Place {
  ulong mask_start;
  uint first_row;  // of the key head's T * Hq / Hk queries: token t of the g-th head is row g * T + t
  uint rows;
  uint lane;
  Row key;
  Row value;
};

template <typename T, int kLanes, int kQueries>
inline void add_tile(thread Softmax<kQueries>& softmax, thread const Wide* queries, device const T* k,
                     device const T* v, device const uchar* mask, uint tile, uint end, Place at,
                     constant AttentionParams& params) {
  constexpr int kAhead = sizeof(T) == 4 ? 2 : 4;  // rows in flight; no measurement
  float bias[kQueries], score[kQueries];
  uint seen = 0;
  UNROLL for (int r = 0; r < kQueries; ++r) {
    const uint row = at.first_row + r, key = tile + at.lane;
    const bool exists = row < at.rows && key < end;
    bias[r] = exists ? bias_of(mask, at.mask_start, row % params.tokens, key, params) : -INFINITY;
    score[r] = 0.0f;
    seen |= ballot(bias[r] != -INFINITY);
  }
  if (seen == 0) return;

  const uint first = at.lane / kLanes * kLanes, own = at.lane % kLanes;
  ROLLED for (uint step = 0; step < kLanes; step += kAhead) {
    Elements<T> rows[kAhead];
    UNROLL for (int i = 0; i < kAhead; ++i) {
      const uint index = first + step + i;
      rows[i] =
          load_elements(k + ulong(tile + index) * params.k_key_stride, at.key, (seen >> index & 1) != 0);
    }
    UNROLL for (int i = 0; i < kAhead; ++i) {
      const Wide row = widen(rows[i]);
      UNROLL for (int r = 0; r < kQueries; ++r) {
        const float sum = sum_of_piece<kLanes>(dot(queries[r], row));
        if (own == step + i) score[r] = sum;
      }
    }
  }
  UNROLL for (int r = 0; r < kQueries; ++r) {
    const float biased = bias[r] == -INFINITY ? -INFINITY : score[r] + bias[r];
    const float highest = max(softmax.highest[r], simd_max(biased));
    const float factor = precise::exp(softmax.highest[r] - highest);
    score[r] = precise::exp(biased - highest);
    softmax.highest[r] = highest;
    softmax.sum[r] = softmax.sum[r] * factor + score[r];
    softmax.values[r] = scaled(softmax.values[r], factor);
  }
  ROLLED for (uint step = 0; step < kLanes; step += kAhead) {
    Elements<T> rows[kAhead];
    UNROLL for (int i = 0; i < kAhead; ++i) {
      const uint index = first + step + i;
      rows[i] =
          load_elements(v + ulong(tile + index) * params.v_key_stride, at.value, (seen >> index & 1) != 0);
    }
    UNROLL for (int i = 0; i < kAhead; ++i) {
      const Wide row = widen(rows[i]);
      UNROLL for (int r = 0; r < kQueries; ++r) {
        const float weight = simd_shuffle(score[r], ushort(first + step + i));
        softmax.values[r] = with_added(softmax.values[r], weight, row);
      }
    }
  }
}

// The results of a query over all its keys, and the sink of its head.
struct Total {
  float highest;
  float sum;
};

// What the values are multiplied by in the end; 0 if the query saw no key.
inline float final_factor(Total total, device const uchar* sinks, uint head,
                          constant AttentionParams& params) {
  if (params.has_sinks == 0) return total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
  const float sink = load_one(sinks, params.sinks_dtype, head);
  const float highest = max(total.highest, sink);
  const float factor = precise::exp(total.highest - highest);
  const float sum = total.sum * factor + precise::exp(sink - highest);
  return sum == 0.0f ? 0.0f : factor / sum;
}

// Where the chunks leave their results for attention_merge: the values of all, then (highest, sum) of each.
inline device float* partial_values(device float* partials, uint chunk, uint row,
                                    constant AttentionParams& params) {
  return partials + (ulong(chunk) * params.rows + row) * params.value_width;
}

inline device float* partial_total(device float* partials, uint chunk, uint row,
                                   constant AttentionParams& params) {
  const ulong all_values = ulong(params.chunks) * params.rows * params.value_width;
  return partials + all_values + 2 * (ulong(chunk) * params.rows + row);
}

// The results of a threadgroup's simdgroups for its queries.
template <int kLanes, int kQueries>
struct Shares {
  float highest[kAttentionSimdgroups][kQueries];
  float sum[kAttentionSimdgroups][kQueries];
  float values[kAttentionSimdgroups][kQueries][kLanes * kHeadElements];
};

template <int kLanes, int kQueries>
inline void leave_share(threadgroup Shares<kLanes, kQueries>& shares, thread const Softmax<kQueries>& softmax,
                        uint simdgroup, uint lane) {
  UNROLL for (int r = 0; r < kQueries; ++r) {
    const float sum = simd_sum(softmax.sum[r]);
    if (lane == 0) {
      shares.highest[simdgroup][r] = softmax.highest[r];
      shares.sum[simdgroup][r] = sum;
    }
    UNROLL for (int i = 0; i < 4; ++i) {
      const float low = sum_of_pieces<kLanes>(softmax.values[r].low[i]);
      const float high = sum_of_pieces<kLanes>(softmax.values[r].high[i]);
      if (lane < kLanes) {
        shares.values[simdgroup][r][lane * kHeadElements + i] = low;
        shares.values[simdgroup][r][lane * kHeadElements + 4 + i] = high;
      }
    }
  }
}

template <typename T, int kLanes, int kQueries>
[[kernel, max_total_threads_per_threadgroup(kAttentionSimdgroups* kSimdWidth)]] void attention_chunk(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const uchar* sinks [[buffer(4)]],
    device T* output [[buffer(5)]], device float* partials [[buffer(6)]],
    constant AttentionParams& params [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Shares<kLanes, kQueries> shares;
  const uint group_heads = params.heads / params.key_heads;
  const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
  const uint element = lane % kLanes * kHeadElements;
  const bool vectorised = params.vectorised != 0;
  const Place at = {batch * params.mask_batch_stride,    uint(group.y * kQueries),
                    group_heads * params.tokens,         lane,
                    {element, params.width, vectorised}, {element, params.value_width, vectorised}};
  const uint first_head = key_head * group_heads;

  Wide queries[kQueries];
  Softmax<kQueries> softmax;
  UNROLL for (int r = 0; r < kQueries; ++r) {
    const uint row = at.first_row + r, head = first_head + row / params.tokens;
    device const T* query = q + batch * params.q_batch_stride + head * params.q_head_stride +
                            row % params.tokens * params.q_token_stride;
    queries[r] = scaled(widen(load_elements(query, at.key, row < at.rows)), params.scale);
    softmax.highest[r] = kLowest;
    softmax.sum[r] = 0.0f;
    softmax.values[r] = scaled(queries[r], 0.0f);
  }

  k += batch * params.k_batch_stride + key_head * params.k_head_stride;
  v += batch * params.v_batch_stride + key_head * params.v_head_stride;
  const uint begin = params.first_key + group.x * params.chunk;
  const uint end = min(begin + params.chunk, params.keys);
  for (uint tile = begin + simdgroup * kSimdWidth; tile < end; tile += kAttentionSimdgroups * kSimdWidth) {
    add_tile<T, kLanes, kQueries>(softmax, queries, k, v, mask, tile, end, at, params);
  }
  leave_share(shares, softmax, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint r = simdgroup; r < kQueries && at.first_row + r < at.rows; r += kAttentionSimdgroups) {
    const uint token = (at.first_row + r) % params.tokens;
    const uint head = first_head + (at.first_row + r) / params.tokens;
    const uint row = (batch * params.tokens + token) * params.heads + head;
    Total total = {kLowest, 0.0f};
    float factors[kAttentionSimdgroups];
    UNROLL for (uint s = 0; s < kAttentionSimdgroups; ++s) total.highest =
        max(total.highest, shares.highest[s][r]);
    UNROLL for (uint s = 0; s < kAttentionSimdgroups; ++s) {
      factors[s] = precise::exp(shares.highest[s][r] - total.highest);
      total.sum += factors[s] * shares.sum[s][r];
    }
    const float factor = params.chunks > 1 ? 1.0f : final_factor(total, sinks, head, params);
    for (uint i = lane; i < params.value_width; i += kSimdWidth) {
      float value = 0.0f;
      UNROLL for (uint s = 0; s < kAttentionSimdgroups; ++s) value += factors[s] * shares.values[s][r][i];
      if (params.chunks > 1) {
        partial_values(partials, group.x, row, params)[i] = value;
      } else {
        output[ulong(row) * params.value_width + i] = T(value * factor);
      }
    }
    if (params.chunks > 1 && lane == 0) {
      partial_total(partials, group.x, row, params)[0] = total.highest;
      partial_total(partials, group.x, row, params)[1] = total.sum;
    }
  }
}

// A simdgroup takes a query and adds up its chunks in ascending order.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kAttentionSimdgroups* kSimdWidth)]] void attention_merge(
    device float* partials [[buffer(0)]], device const uchar* sinks [[buffer(1)]],
    device T* output [[buffer(2)]], constant AttentionParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group * kAttentionSimdgroups + simdgroup;
  if (row >= params.rows) return;
  Total total = {kLowest, 0.0f};
  for (uint chunk = lane; chunk < params.chunks; chunk += kSimdWidth) {
    total.highest = max(total.highest, partial_total(partials, chunk, row, params)[0]);
  }
  total.highest = simd_max(total.highest);
  float values[kHeadElements];
  UNROLL for (uint i = 0; i < kHeadElements; ++i) values[i] = 0.0f;
  for (uint chunk = 0; chunk < params.chunks; ++chunk) {
    device const float* of_chunk = partial_total(partials, chunk, row, params);
    const float factor = precise::exp(of_chunk[0] - total.highest);
    total.sum += factor * of_chunk[1];
    device const float* source = partial_values(partials, chunk, row, params);
    UNROLL for (uint i = 0; i < kHeadElements; ++i) {
      const uint column = lane + i * kSimdWidth;
      if (column < params.value_width) values[i] += factor * source[column];
    }
  }
  const float factor = final_factor(total, sinks, row % params.heads, params);
  UNROLL for (uint i = 0; i < kHeadElements; ++i) {
    const uint column = lane + i * kSimdWidth;
    if (column < params.value_width) output[ulong(row) * params.value_width + column] = T(values[i] * factor);
  }
}
