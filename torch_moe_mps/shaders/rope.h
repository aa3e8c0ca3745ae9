// Rotary position embedding of q and k with the RMSNorm of their heads, and v with its norm: a simdgroup
// takes one head of a token.
//
// The elements of a head are taken in pairs: first the pairs that are rotated, then the elements that stay as
// they are, the first half of them with the second. A lane takes N neighbouring pairs; heads of up to 64 * N
// elements are read once.
#pragma once
#include "common/any_vectors.h"
#include "common/sums.h"
#include "geometry/rope.h"
#include "params/rope.h"

template <int N>
struct Pairs {
  Floats<N> first;
  Floats<N> second;
};

// Where pairs are in a head: the first elements of all from `first` on and the second ones from `second` on,
// or first and second alternating from `first` on.
struct PairsAt {
  uint first;
  uint second;
  bool interleaved;
};

// Where the pairs from `pair` on are in a head, as it is read or as it is stored.
inline PairsAt pairs_at(uint pair, bool interleaved, constant RopeHeads& heads, constant RopeParams& params) {
  const uint turning = heads.rotary / 2;
  if (pair < turning) {
    const uint start = params.rotary_last != 0 ? heads.width - heads.rotary : 0;
    if (interleaved) return {start + 2 * pair, 0, true};
    return {start + pair, start + pair + turning, false};
  }
  const uint start = (params.rotary_last != 0 ? 0 : heads.rotary) + pair - turning;
  return {start, start + heads.width / 2 - turning, false};
}

// a[0] b[0] a[1] b[1] ... -> a, b
inline Pairs<1> untangled(float low, float high) {
  return {low, high};
}
inline Pairs<4> untangled(float4 low, float4 high) {
  return {float4(low.xz, high.xz), float4(low.yw, high.yw)};
}

// a, b -> a[0] b[0] a[1] b[1] ...
inline Pairs<1> tangled(Pairs<1> x) {
  return x;
}
inline Pairs<4> tangled(Pairs<4> x) {
  const float4 a = x.first, b = x.second;
  return {float4(a.x, b.x, a.y, b.y), float4(a.z, b.z, a.w, b.w)};
}

template <int N>
inline Pairs<N> load_pairs(device const uchar* source, uint dtype, ulong start, PairsAt at) {
  const uint second = at.interleaved ? at.first + N : at.second;
  const AnyVector<N> low = load_any_raw<N>(source, dtype, start + at.first);
  const AnyVector<N> high = load_any_raw<N>(source, dtype, start + second);
  if (at.interleaved) return untangled(widen<N>(low, dtype), widen<N>(high, dtype));
  return {widen<N>(low, dtype), widen<N>(high, dtype)};
}

template <int N, typename T>
inline Pairs<N> load_pairs(device const T* head, PairsAt at) {
  const Vector<T, N> low = load<N>(head + at.first);
  const Vector<T, N> high = load<N>(head + (at.interleaved ? at.first + N : at.second));
  if (at.interleaved) return untangled(widen(low), widen(high));
  return {widen(low), widen(high)};
}

template <int N, typename T>
inline void store_pairs(device T* head, PairsAt at, Pairs<N> pairs) {
  if (at.interleaved) pairs = tangled(pairs);
  store(head + at.first, pairs.first);
  store(head + (at.interleaved ? at.first + N : at.second), pairs.second);
}

// To what takes elements one by one.
template <int N, typename Row>
inline void store_pairs(Row row, PairsAt at, Pairs<N> pairs) {
  if (at.interleaved) pairs = tangled(pairs);
  const uint second = at.interleaved ? at.first + N : at.second;
  UNROLL for (int i = 0; i < N; ++i) {
    row.put(at.first + i, pairs.first[i]);
    row.put(second + i, pairs.second[i]);
  }
}

// The table's entries, cos or sin, for the pairs from `pair` on, of which there are `turning`.
template <int N>
inline Pairs<N> load_table(device const uchar* table, ulong row, uint pair, uint turning,
                           constant RopeParams& params) {
  if (params.table_of_pairs != 0) {
    const Floats<N> of_pairs = load_any<N>(table, params.table_dtype, row + pair);
    return {of_pairs, of_pairs};
  }
  if (params.pairs != PAIRS_HALF) return load_pairs<N>(table, params.table_dtype, row, {2 * pair, 0, true});
  return load_pairs<N>(table, params.table_dtype, row, {pair, pair + turning, false});
}

template <int N>
inline Pairs<N> turned(Pairs<N> x, Pairs<N> cos, Pairs<N> sin) {
  return {x.first * cos.first - x.second * sin.first, x.second * cos.second + x.first * sin.second};
}

template <int N>
inline Pairs<N> normed(Pairs<N> x, float inverse, Pairs<N> weight, float offset) {
  return {x.first * inverse * (weight.first + offset), x.second * inverse * (weight.second + offset)};
}

template <int N>
inline float sum_of_squares(Pairs<N> x, float mean) {
  return sum_of_squares(x.first - mean) + sum_of_squares(x.second - mean);
}

template <typename T, int N>
inline float mean_of(device const T* head, Pairs<N> kept, constant RopeHeads& heads,
                     constant RopeParams& params, uint lane) {
  const bool interleaved = params.pairs != PAIRS_HALF;
  float sum = 0.0f;
  for (uint pair = lane * N; pair < heads.width / 2; pair += kSimdWidth * N) {
    Pairs<N> x = kept;
    if (pair != lane * N) x = load_pairs<N>(head, pairs_at(pair, interleaved, heads, params));
    sum += sum_of(x.first) + sum_of(x.second);
  }
  return simd_sum(sum) / float(heads.width);
}

// kCentred: the norm is a LayerNorm with a bias.
template <typename T, int N, bool kCentred, typename Output>
inline void rope_head(device const T* head, device const uchar* weight, device const uchar* bias,
                      device const uchar* cos, device const uchar* sin, ulong table_row, Output output,
                      constant RopeHeads& heads, constant RopeParams& params, uint lane) {
  const uint pairs = heads.width / 2, turning = heads.rotary / 2;
  const bool interleaved = params.pairs != PAIRS_HALF;
  const uint first = lane * N, step = kSimdWidth * N;
  Pairs<N> kept;
  if (first < pairs) kept = load_pairs<N>(head, pairs_at(first, interleaved, heads, params));
  float inverse = 1.0f, mean = 0.0f;
  if (heads.is_normed != 0) {
    if constexpr (kCentred) mean = mean_of<T, N>(head, kept, heads, params, lane);
    float sum = first < pairs ? sum_of_squares(kept, mean) : 0.0f;
    for (uint pair = first + step; pair < pairs; pair += step) {
      sum += sum_of_squares(load_pairs<N>(head, pairs_at(pair, interleaved, heads, params)), mean);
    }
    inverse = heads.norm_factor * precise::rsqrt(simd_sum(sum) / float(heads.width) + params.eps);
  }
  for (uint pair = first; pair < pairs; pair += step) {
    const PairsAt from = pairs_at(pair, interleaved, heads, params);
    Pairs<N> x = kept;
    if (pair != first) x = load_pairs<N>(head, from);
    if (heads.has_weight != 0) {
      if constexpr (kCentred) x = Pairs<N>{x.first - mean, x.second - mean};
      x = normed(x, inverse, load_pairs<N>(weight, heads.weight_dtype, 0, from), params.weight_offset);
      if constexpr (kCentred) {
        const Pairs<N> added = load_pairs<N>(bias, heads.weight_dtype, 0, from);
        x = Pairs<N>{x.first + added.first, x.second + added.second};
      }
    } else if (heads.is_normed != 0) {
      x = Pairs<N>{x.first * inverse, x.second * inverse};
    }
    if (pair < turning) {
      x = turned(x, load_table<N>(cos, table_row, pair, turning, params),
                 load_table<N>(sin, table_row, pair, turning, params));
    }
    store_pairs(output, pairs_at(pair, params.pairs == PAIRS_INTERLEAVED, heads, params), x);
  }
}

// kCentred: k has a LayerNorm, whose bias is in place of the weight of v, of which there is none.
template <typename T, bool kCentred>
[[kernel, max_total_threads_per_threadgroup(kRopeHeads* kSimdWidth)]] void rope_heads(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* cos [[buffer(3)]], device const uchar* sin [[buffer(4)]],
    device const uchar* q_weight [[buffer(5)]], device const uchar* k_weight [[buffer(6)]],
    device const uchar* v_weight [[buffer(7)]], device T* q_output [[buffer(8)]],
    device T* k_output [[buffer(9)]], device T* v_output [[buffer(10)]],
    constant RopeParams& params [[buffer(11)]], uint group [[threadgroup_position_in_grid]], LANES) {
  const uint row = group * kRopeHeads + simdgroup;
  if (row >= params.rows) return;
  const uint first_v = params.q.heads + params.k.heads, all_heads = first_v + params.v.heads;
  const uint position = row / all_heads, place = row % all_heads;
  const uint batch = position / params.tokens, token = position % params.tokens;
  const bool is_k = place >= params.q.heads && place < first_v, is_v = place >= first_v;
  const uint head = place - (is_v ? first_v : is_k ? params.q.heads : 0);
  constant RopeHeads& heads = is_v ? params.v : is_k ? params.k : params.q;
  device const T* source = (is_v ? v : is_k ? k : q) + token_start(heads.input, batch, token, head);
  device T* target = (is_v   ? v_output
                      : is_k ? k_output
                             : q_output) +
                     token_start(heads.output, batch, token, head);
  device const uchar* weight = is_v ? v_weight : is_k ? k_weight : q_weight;
  const ulong table_row = batch * params.table_batch_stride + token * params.table_token_stride;
  if (params.vectorised != 0) {
    rope_head<T, 4, kCentred>(source, weight, v_weight, cos, sin, table_row, target, heads, params, lane);
  } else {
    rope_head<T, 1, kCentred>(source, weight, v_weight, cos, sin, table_row, target, heads, params, lane);
  }
}
