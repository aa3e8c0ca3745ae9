// Entries of a cache that stand for windows of tokens.
#pragma once
#include "common/any_rows.h"
#include "common/sums.h"
#include "common/vectors.h"
#include "geometry/pooling.h"
#include "params/pooling.h"

// The softmax of two columns' logits, and what it weights.
struct Pooled {
  float2 most, sum, total;
};

// Keys of the tokens of a batch entry: the new ones in the call, those before them in the state.
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

  // Pool of the columns from `at` on, tokens `begin` to `end` of a window: the state's, then the call's. The
  // highest logit of all is found first, and weights are relative to it.
  template <bool kWeighted>
  void pool(thread Pooled& pooled, uint begin, uint end, uint at, constant PoolParams& params) const {
    for (uint is_new = 0; is_new < 2; ++is_new) {
      uint token = is_new != 0 ? max(begin, params.position) : begin;
      const uint last = is_new != 0 ? end : min(end, params.position);
      if (token >= last) continue;
      uint place = token % params.rate * params.columns + at;
      device const T* value = row_of(token, params) + at;
      device const T* gate = value + params.columns;
      ulong stride = 2 * params.columns, gate_stride = stride;
      if (is_new != 0) {
        stride = params.kv.token, gate_stride = params.gate.token;
        value = values + (token - params.position) * stride + at;
        gate = gates + (token - params.position) * gate_stride + at;
      }
      for (; token < last; ++token) {
        const Pack<2> added = load_row<2>(bias, params.bias_dtype, place);
        const float2 own = float2(widen(gate[0]) + added.v[0], widen(gate[1]) + added.v[1]);
        place += params.columns;
        gate += gate_stride;
        if constexpr (kWeighted) {
          const float2 weight =
              float2(precise::exp(own.x - pooled.most.x), precise::exp(own.y - pooled.most.y));
          pooled.sum += weight;
          pooled.total += weight * float2(widen(value[0]), widen(value[1]));
          value += stride;
        } else {
          pooled.most = max(pooled.most, own);
        }
      }
    }
  }

  // A part of the window's tokens, with overlap behind the same part of those of the one before it.
  template <bool kWeighted>
  void pool_part(thread Pooled& pooled, uint window, uint part, constant PoolParams& params) const {
    const uint begin = part * params.rate / params.parts, end = (part + 1) * params.rate / params.parts;
    const bool overlaps = params.columns > params.width;
    if (overlaps && window > 0) {
      const uint before = (window - 1) * params.rate;
      pool<kWeighted>(pooled, before + begin, before + end, column, params);
    }
    const uint own = window * params.rate;
    pool<kWeighted>(pooled, own + begin, own + end, column + (overlaps ? params.width : 0), params);
  }

  // Into the state, what the thread's columns have of the last tokens.
  void keep(uint part, constant PoolParams& params) const {
    const uint end = params.position + params.tokens;
    for (uint token = end - min(params.tokens, params.rows) + part; token < end; token += params.parts) {
      device T* row = row_of(token, params);
      const ulong place = token - params.position;
      for (uint at = column; at < params.columns; at += params.width) {
        UNROLL for (uint i = 0; i < 2; ++i) {
          row[at + i] = values[place * params.kv.token + at + i];
          row[params.columns + at + i] = gates[place * params.gate.token + at + i];
        }
      }
    }
  }
};

// A threadgroup takes a window; a thread two neighbouring channels of all that it reads and writes, of a part
// of the tokens. The first threadgroup takes all windows that read the state, and then updates it, so that no
// other one is in its way.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kPoolThreads)]] void pool_windows(
    device const T* kv [[buffer(0)]], device const T* gate [[buffer(1)]],
    device const uchar* bias [[buffer(2)]], device T* state [[buffer(3)]], device T* entries [[buffer(4)]],
    device const uchar* weight [[buffer(5)]], device const uchar* inv_freq [[buffer(6)]],
    constant PoolParams& params [[buffer(7)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float partials[kPoolThreads / kSimdWidth];
  threadgroup float2 parts[2][kPoolThreads];
  const uint batch = group.y, pairs = params.width / 2;
  const uint part_simdgroups = (pairs + kSimdWidth - 1) / kSimdWidth,
             part_threads = part_simdgroups * kSimdWidth;
  const uint part = thread_index / part_threads, pair = thread_index % part_threads;
  const bool has_columns = pair < pairs;
  const PooledTokens<T> tokens = {kv + batch * params.kv.batch, gate + batch * params.gate.batch, bias,
                                  state + ulong(batch) * params.rows * 2 * params.columns, 2 * pair};
  const uint of_first = params.columns > params.width ? 2 : 1;
  const uint closed = (params.position + params.tokens) / params.rate;
  const uint begin = params.position / params.rate + (group.x == 0 ? 0 : of_first - 1 + group.x);
  const uint end = min(closed, begin + (group.x == 0 ? of_first : 1));
  for (uint window = begin; window < end; ++window) {
    Pooled pooled = {-INFINITY, 0.0f, 0.0f};
    if (has_columns) tokens.template pool_part<false>(pooled, window, part, params);
    parts[0][thread_index] = pooled.most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < params.parts; ++i) pooled.most = max(pooled.most, parts[0][i * part_threads + pair]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (has_columns) tokens.template pool_part<true>(pooled, window, part, params);
    parts[0][thread_index] = pooled.sum;
    parts[1][thread_index] = pooled.total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool is_owner = has_columns && part == 0;
    float2 x = 0.0f;
    if (is_owner) {
      for (uint i = 1; i < params.parts; ++i) {
        pooled.sum += parts[0][i * part_threads + pair];
        pooled.total += parts[1][i * part_threads + pair];
      }
      x = pooled.total / pooled.sum;
    }
    const float squares =
        threadgroup_sum(x.x * x.x + x.y * x.y, partials, lane, simdgroup, params.parts * part_simdgroups);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next sum
    if (!is_owner) continue;
    const float inverse = precise::rsqrt(squares / float(params.width) + params.eps);
    const uint at = tokens.column;
    x *= inverse *
         float2(load_one(weight, params.weight_dtype, at), load_one(weight, params.weight_dtype, at + 1));
    const uint still = pairs - params.turning;
    if (pair >= still) {
      const float angle = float(window * params.rate) * load_one(inv_freq, params.freq_dtype, pair - still);
      const float cosine = precise::cos(angle) * params.scaling, sine = precise::sin(angle) * params.scaling;
      x = float2(x.x * cosine - x.y * sine, x.y * cosine + x.x * sine);
    }
    device T* entry = entries + batch * params.entries.batch + window * params.entries.token;
    entry[at] = narrow<T>(x.x);
    entry[at + 1] = narrow<T>(x.y);
  }
  if (group.x != 0) return;
  threadgroup_barrier(mem_flags::mem_device);  // other threads have read what is overwritten
  if (has_columns) tokens.keep(part, params);
}
