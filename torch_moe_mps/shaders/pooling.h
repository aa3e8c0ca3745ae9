// Entries of a cache that stand for windows of tokens.
#pragma once
#include "common.h"

// What the tokens of a batch entry have: the new ones in the call, those before them in the state.
template <typename T>
struct PooledTokens {
  device const T* values;
  device const T* gates;
  device const uchar* bias;
  device T* state;
  uint column;  // of the two that the thread has, in an entry

  device T* row_of(uint token, constant PoolParams& params) const {
    return state + token % params.rows * 2 * params.columns;
  }

  // Of two neighbouring columns.
  float2 value(uint token, uint at, constant PoolParams& params) const {
    return two(token, at, values, params.token_stride, 0, params);
  }
  float2 logit(uint token, uint at, constant PoolParams& params) const {
    const ulong place = ulong(token % params.rate) * params.columns + at;
    return two(token, at, gates, params.gate_token_stride, params.columns, params) +
           float2(load_one(bias, params.bias_dtype, place), load_one(bias, params.bias_dtype, place + 1));
  }
  float2 two(uint token, uint at, device const T* given, ulong stride, uint behind,
             constant PoolParams& params) const {
    device const T* source =
        token < params.position ? row_of(token, params) + behind : given + (token - params.position) * stride;
    return float2(widen(source[at]), widen(source[at + 1]));
  }

  // The tokens of the window, with overlap behind those of the one before it.
  float2 pooled(uint window, constant PoolParams& params) const {
    const uint own = window * params.rate, end = own + params.rate;
    const bool overlaps = params.columns > params.width;
    const uint first = overlaps && window > 0 ? own - params.rate : own;
    float2 most = -INFINITY, sum = 0.0f, total = 0.0f;
    for (uint token = first; token < end; ++token) {
      most = max(most, logit(token, column_at(token, own, overlaps, params), params));
    }
    for (uint token = first; token < end; ++token) {
      const uint at = column_at(token, own, overlaps, params);
      const float2 logits = logit(token, at, params);
      const float2 weight = float2(precise::exp(logits.x - most.x), precise::exp(logits.y - most.y));
      sum += weight;
      total += weight * value(token, at, params);
    }
    return total / sum;
  }
  uint column_at(uint token, uint own, bool overlaps, constant PoolParams& params) const {
    return column + (overlaps && token >= own ? params.width : 0);
  }

  // Into the state, what the thread's columns have of the last tokens.
  void keep(constant PoolParams& params) const {
    const uint end = params.position + params.tokens;
    for (uint token = end - min(params.tokens, params.rows); token < end; ++token) {
      device T* row = row_of(token, params);
      const ulong place = token - params.position;
      for (uint at = column; at < params.columns; at += params.width) {
        UNROLL for (uint i = 0; i < 2; ++i) {
          row[at + i] = values[place * params.token_stride + at + i];
          row[params.columns + at + i] = gates[place * params.gate_token_stride + at + i];
        }
      }
    }
  }
};

// A threadgroup takes a window; a thread two neighbouring channels of all that it reads and writes. The first
// threadgroup takes all windows that read the state, and then updates it, so that no other one is in its way.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kPoolThreads)]] void pool_windows(
    device const T* kv [[buffer(0)]], device const T* gate [[buffer(1)]],
    device const uchar* bias [[buffer(2)]], device T* state [[buffer(3)]], device T* entries [[buffer(4)]],
    device const uchar* weight [[buffer(5)]], device const uchar* inv_freq [[buffer(6)]],
    constant PoolParams& params [[buffer(7)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partials[kPoolThreads / kSimdWidth];
  const uint batch = group.y, pairs = params.width / 2;
  const bool has_columns = thread_index < pairs;
  const PooledTokens<T> tokens = {kv + batch * params.batch_stride, gate + batch * params.gate_batch_stride,
                                  bias, state + ulong(batch) * params.rows * 2 * params.columns,
                                  2 * thread_index};
  const uint of_first = params.columns > params.width ? 2 : 1;
  const uint closed = (params.position + params.tokens) / params.rate;
  const uint begin = params.position / params.rate + (group.x == 0 ? 0 : of_first - 1 + group.x);
  const uint end = min(closed, begin + (group.x == 0 ? of_first : 1));
  for (uint window = begin; window < end; ++window) {
    float2 x = 0.0f;
    if (has_columns) x = tokens.pooled(window, params);
    const uint simdgroups = (pairs + kSimdWidth - 1) / kSimdWidth;
    const float squares = threadgroup_sum(x.x * x.x + x.y * x.y, partials, lane, simdgroup, simdgroups);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next sum
    if (!has_columns) continue;
    const float inverse = precise::rsqrt(squares / float(params.width) + params.eps);
    const uint at = tokens.column;
    x *= inverse *
         float2(load_one(weight, params.weight_dtype, at), load_one(weight, params.weight_dtype, at + 1));
    const uint still = pairs - params.turning;
    if (thread_index >= still) {
      const float angle =
          float(window * params.rate) * load_one(inv_freq, params.freq_dtype, thread_index - still);
      const float cosine = precise::cos(angle) * params.scaling, sine = precise::sin(angle) * params.scaling;
      x = float2(x.x * cosine - x.y * sine, x.y * cosine + x.x * sine);
    }
    device T* entry = entries + batch * params.entry_batch_stride + window * params.entry_stride;
    entry[at] = narrow<T>(x.x);
    entry[at + 1] = narrow<T>(x.y);
  }
  if (group.x == 0 && has_columns) tokens.keep(params);
}
