// Linear attention: the convolution in front of it and the recurrence.
#pragma once
#include "common/activations.h"
#include "common/any_rows.h"
#include "common/any_stores.h"
#include "common/simdgroups.h"
#include "common/vectors.h"
#include "geometry/linear_attention.h"
#include "params/linear_attention.h"

// How many tokens of a row are pending and right.
inline uint count_of(device const int* counts, uint room, ulong batch) {
  return room == 0 ? 0 : uint(clamp(counts[batch], 0, int(room)));
}

// Positions of a channel: those of the state, those that are pending, and those of the input.
template <typename T>
struct ConvPositions {
  device const uchar* state;
  ulong state_start;
  device const T* pending;
  uint end;  // of those that are pending
  device const T* x;
  ulong x_start;

  float value(uint position, constant ConvParams& params) const {
    if (position >= end) return float(x[x_start + (position - end) * params.x.token]);
    if (position >= params.length) return float(pending[position - params.length]);
    return load_one(state, params.state_dtype, state_start + position);
  }
};

// A thread takes some results of a channel. Only those of the first ones read the state: they read it for
// all sums before they write the new one, in ascending order, so that a position is read before it is
// overwritten. Grid: (channels, results, batch).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kConvThreads)]] void conv_channels(
    device const T* x [[buffer(0)]], device uchar* state [[buffer(1)]],
    device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
    device T* output [[buffer(4)]], device T* pending [[buffer(5)]], device const int* counts [[buffer(6)]],
    constant ConvParams& params [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint channel = group.x * kConvThreads + thread_index;
  if (channel >= params.channels) return;
  const ulong x_start = group.z * params.x.batch + channel * params.x.head;
  const ulong state_start = (ulong(group.z) * params.channels + channel) * params.length;
  const uint start = group.y * params.thread_results, end = min(start + params.thread_results, params.tokens);
  pending += (ulong(group.z) * params.channels + channel) * params.pending;
  const uint count = count_of(counts, params.pending, group.z);
  const ConvPositions<T> every = {state, state_start, pending, params.length + count, x, x_start};
  for (uint result = start; result < end; ++result) {
    float sum = params.has_bias != 0 ? load_one(bias, params.bias_dtype, channel) : 0.0f;
    const uint first = every.end + result + 1 - params.width;
    for (uint i = 0; i < params.width; ++i) {
      const float factor = load_one(weight, params.weight_dtype, ulong(channel) * params.width + i);
      sum = fma(factor, every.value(first + i, params), sum);
    }
    const ulong place = (ulong(group.z) * params.tokens + result) * params.channels + channel;
    if (params.silu != 0) sum = silu(sum);
    if (params.add_input != 0) sum += float(x[x_start + result * params.x.token]);
    output[place] = T(sum);
  }
  if (start != 0) return;
  const uint taken = params.keep != 0 ? count : count + params.tokens;
  for (uint i = 0; i < params.length; ++i) {
    store_any(state, params.state_dtype, state_start + i, every.value(taken + i, params));
  }
  if (params.keep == 0) return;
  for (uint token = 0; token < params.tokens; ++token) pending[token] = x[x_start + token * params.x.token];
}

// The recurrence: what a token's keys do to the state.
#define SCAN_PLAIN 0     // S = decay S + k u
#define SCAN_DELTA 1     // u is what the state lacks
#define SCAN_CHANNELS 2  // the same, with a decay for each row

// The logarithm of a decay; `rate` is exp(A_log).
inline float log_decay(float g, float rate, float shift, constant LinearAttentionParams& params) {
  if (params.decay == DECAY_SOFTPLUS) return -rate * softplus(g + shift);
  if (params.decay == DECAY_SIGMOID) return params.lower_bound * sigmoid(rate * (g + shift));
  return g;
}

inline float activated_beta(float beta, float shift, constant LinearAttentionParams& params) {
  if (params.beta_activation == BETA_SIGMOID) beta = sigmoid(beta);
  if (params.beta_activation == BETA_SOFTPLUS) beta = softplus(beta + shift);
  return beta < params.beta_min ? params.beta_min : beta;  // NaN stays
}

// Arguments of a head's step at a token, in threadgroup memory.
template <uint kRows, bool kChannels>
struct ScanToken {
  float4 key[kRows / 4];
  float4 query[kRows / 4];
  float4 decays[kChannels ? kRows / 4 : 1];
  float decay;
  float beta;
  float q_scale;  // of a norm, and of the result
  float k_scale;
  float q_dot_k;  // scaled
  uint zero;
};

// rms(row) * weight * gate of a head, in place, by one simdgroup.
template <typename T>
inline void norm_and_gate(device T* row, device const T* gate, device const uchar* weight,
                          constant LinearAttentionParams& params, uint lane) {
  float squares = 0.0f;
  for (uint i = lane; i < params.value_width; i += kSimdWidth) squares += float(row[i]) * float(row[i]);
  const float inverse = precise::rsqrt(simd_sum(squares) / float(params.value_width) + params.norm_eps);
  for (uint i = lane; i < params.value_width; i += kSimdWidth) {
    const float factor = load_one(weight, params.norm_dtype, i) + params.norm_weight_offset;
    const float x = float(gate[i]), activated = params.gate_is_sigmoid != 0 ? sigmoid(x) : silu(x);
    row[i] = T(float(row[i]) * inverse * factor * activated);
  }
}

// The columns of a head's state that a lane holds some rows of.
struct ScanColumns {
  device float* first;  // of its rows, in its first column
  uint column;
  int rows;  // how many of the key's rows are from its first on
  bool is_own[2];
};

template <uint kLanes>
inline ScanColumns columns_of(device float* state, uint start, uint lane,
                              constant LinearAttentionParams& params) {
  ScanColumns own;
  const uint row = 4 * (lane % kLanes);
  own.column = start + lane / kLanes * kScanColumns;
  own.first = state + row * params.state_row_stride + own.column * params.state_column_stride;
  own.rows = int(params.key_width) - int(row);
  own.is_own[0] = own.column < params.value_width;
  own.is_own[1] = own.column + 1 < params.value_width;
  return own;
}

// Loads the columns of a head's state into registers, or stores them.
template <bool kLoads, uint kLanes>
inline void move_state(thread float2 (&kept)[kScanRows / 4][4], const ScanColumns own,
                       constant LinearAttentionParams& params) {
  UNROLL for (uint j = 0; j < kScanRows / 4; ++j) {
    UNROLL for (uint i = 0; i < 4; ++i) {
      device float* place = own.first + (4 * kLanes * j + i) * params.state_row_stride;
      if (kLoads) kept[j][i] = 0.0f;
      if (int(4 * kLanes * j + i) < own.rows) {
        if (kLoads) {
          if (own.is_own[0]) kept[j][i].x = place[0];
          if (own.is_own[1]) kept[j][i].y = place[params.state_column_stride];
        } else {
          if (own.is_own[0]) place[0] = kept[j][i].x;
          if (own.is_own[1]) place[params.state_column_stride] = kept[j][i].y;
        }
      }
    }
  }
}

// Inputs of a head's tokens that are pending, one behind the other: key, value, the key's factor, beta and
// decays.
template <uint kRows, bool kChannels>
struct PendingTokens {
  typedef ScanToken<kRows, kChannels> Token;
  device float* rows;
  uint width;

  PendingTokens(device float* pending, ulong head, constant LinearAttentionParams& params) {
    width = params.key_width + params.value_width + 2 + (kChannels ? params.key_width : 1);
    rows = pending + head * params.pending * width;
  }
  device float* row(uint token) const { return rows + token * width; }

  // Stages a token, by one simdgroup.
  void stage(uint token, threadgroup Token& target, uint lane, constant LinearAttentionParams& params) const {
    device const float* key = row(token);
    device const float* others = key + params.key_width + params.value_width;
    threadgroup float* own_key = reinterpret_cast<threadgroup float*>(target.key);
    threadgroup float* own_decays = reinterpret_cast<threadgroup float*>(target.decays);
    for (uint i = lane; i < kRows; i += kSimdWidth) {
      own_key[i] = i < params.key_width ? key[i] : 0.0f;
      if (kChannels) own_decays[i] = others[2 + min(i, params.key_width - 1)];
    }
    if (lane == 0) {
      target.k_scale = others[0];
      target.beta = others[1];
      target.decay = others[2];
      target.zero = 0;
    }
  }

  // Keeps a token that is staged, by one simdgroup.
  template <typename T>
  void keep(uint token, threadgroup const Token& source, device const T* value, uint lane,
            constant LinearAttentionParams& params) const {
    device float* key = row(token);
    device float* others = key + params.key_width + params.value_width;
    threadgroup const float* own_key = reinterpret_cast<threadgroup const float*>(source.key);
    threadgroup const float* own_decays = reinterpret_cast<threadgroup const float*>(source.decays);
    for (uint i = lane; i < params.key_width; i += kSimdWidth) {
      key[i] = own_key[i];
      if (kChannels) others[2 + i] = own_decays[i];
    }
    for (uint i = lane; i < params.value_width; i += kSimdWidth) key[params.key_width + i] = float(value[i]);
    if (lane == 0) {
      others[0] = source.k_scale;
      others[1] = source.beta;
      if (!kChannels) others[2] = source.decay;
    }
  }
};

// Takes a token that was pending in: the operations of `linear_attention` in their order, without a result.
template <uint kLanes, int kKind, typename Token>
inline void take_in(thread float2 (&kept)[kScanRows / 4][4], threadgroup const Token& token, float2 value,
                    uint part) {
  constexpr uint kRows = kLanes * kScanRows;
  threadgroup const float4* rows = token.key + part;
  threadgroup const float4* same_rows = rows + token.zero;
  const float k_scale = token.k_scale, own_beta = token.beta;
  float2 scaled = k_scale * own_beta * value, k_sum = 0.0f;
  if constexpr (kKind != SCAN_PLAIN) {
    UNROLL for (uint j = 0; j < kScanRows / 4; ++j) {
      const float4 k_rows = rows[kLanes * j];
      float4 factor = token.decay;
      if constexpr (kKind == SCAN_CHANNELS) factor = rows[kRows / 2 + kLanes * j];
      UNROLL for (uint i = 0; i < 4; ++i) {
        kept[j][i] *= factor[i];
        k_sum = fma(float2(k_rows[i]), kept[j][i], k_sum);
      }
    }
    UNROLL for (uint d = 1; d < kLanes; d *= 2) {
      UNROLL for (uint c = 0; c < kScanColumns; ++c) k_sum[c] += simd_shuffle_xor(k_sum[c], ushort(d));
    }
    const float2 written = (value - k_scale * k_sum) * own_beta;
    scaled = k_scale * written;
  }
  UNROLL for (uint j = 0; j < kScanRows / 4; ++j) {
    const float4 k_rows = same_rows[kLanes * j];
    UNROLL for (uint i = 0; i < 4; ++i) {
      const float2 before = kKind == SCAN_PLAIN ? token.decay * kept[j][i] : kept[j][i];
      kept[j][i] = fma(float2(k_rows[i]), scaled, before);
    }
  }
}

// What a head's tokens are staged from.
template <typename T>
struct ScanInputs {
  device const T *q, *k;
  device const uchar *g, *beta, *dt_bias;
  uint batch, head, key_head;
  float rate, shift;  // of its decay
};

// Stages a token by one simdgroup: q and k as floats, their norms, and the token's decays.
template <uint kRows, int kKind, typename T, typename Token>
inline void stage_token(uint token, threadgroup Token& target, ScanInputs<T> in, uint lane,
                        constant LinearAttentionParams& params) {
  device const T* q_row = in.q + token_start(params.q, in.batch, token, in.key_head) + lane;
  device const T* k_row = in.k + token_start(params.k, in.batch, token, in.key_head) + lane;
  threadgroup float* key = reinterpret_cast<threadgroup float*>(target.key) + lane;
  threadgroup float* query = reinterpret_cast<threadgroup float*>(target.query) + lane;
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
  UNROLL for (uint row = 0; row < kRows; row += kSimdWidth) {
    const bool is_row = int(params.key_width) - int(row) > int(lane);
    const float a = is_row ? float(q_row[row]) : 0.0f, b = is_row ? float(k_row[row]) : 0.0f;
    query[row] = a;
    key[row] = b;
    qq = fma(a, a, qq);
    kk = fma(b, b, kk);
    qk = fma(a, b, qk);
  }
  float q_scale = params.scale, k_scale = 1.0f, decay = 1.0f;
  if (params.has_l2norm != 0) {
    q_scale *= precise::rsqrt(simd_sum(qq) + params.l2norm_eps);
    k_scale = precise::rsqrt(simd_sum(kk) + params.l2norm_eps);
  }
  const float q_dot_k = simd_sum(qk) * q_scale * k_scale;
  const ulong beta_start = token_start(params.beta, in.batch, token, in.head);
  const float beta = load_one(in.beta, params.beta_dtype, beta_start);
  const float own_beta = activated_beta(beta, in.shift, params);
  const ulong g_start = token_start(params.g, in.batch, token, in.head);
  if constexpr (kKind == SCAN_CHANNELS) {
    threadgroup float* own_decays = reinterpret_cast<threadgroup float*>(target.decays);
    for (uint row = lane; row < kRows; row += kSimdWidth) {
      const uint channel = min(row, params.key_width - 1);
      const ulong place = ulong(in.head) * params.key_width + channel;
      const float bias = params.has_dt_bias != 0 ? load_one(in.dt_bias, params.dt_bias_dtype, place) : 0.0f;
      const float own_g = load_one(in.g, params.g_dtype, g_start + channel);
      own_decays[row] = precise::exp(log_decay(own_g, in.rate, bias, params));
    }
  } else if (params.decay == DECAY_TIMES_BETA) {
    decay = precise::exp(-in.rate * own_beta);
  } else {
    decay = precise::exp(log_decay(load_one(in.g, params.g_dtype, g_start), in.rate, in.shift, params));
  }
  if (lane == 0) {
    target.decay = decay;
    target.beta = own_beta;
    target.q_scale = q_scale;
    target.k_scale = k_scale;
    target.q_dot_k = q_dot_k;
    target.zero = 0;
  }
}

// Takes a staged token into the state. `rows` and `same_rows`: the lane's first of its keys, which are read
// twice. Returns: its results in the lane's columns.
template <uint kLanes, int kKind, typename Token>
inline float2 take_token(thread float2 (&kept)[kScanRows / 4][4], threadgroup const Token* token,
                         threadgroup const float4* rows, threadgroup const float4* same_rows, float2 value,
                         float own_skip) {
  constexpr uint kRows = kLanes * kScanRows;
  const float scalar_decay = token->decay, own_beta = token->beta, k_scale = token->k_scale;
  float2 k_sum = 0.0f, q_sum = 0.0f;
  if constexpr (kKind == SCAN_PLAIN) {
    const float2 written = k_scale * own_beta * value;
    UNROLL for (uint j = 0; j < kScanRows / 4; ++j) {
      const float4 k_rows = rows[kLanes * j], q_rows = rows[kRows / 4 + kLanes * j];
      UNROLL for (uint i = 0; i < 4; ++i) {
        kept[j][i] = fma(float2(k_rows[i]), written, scalar_decay * kept[j][i]);
        q_sum = fma(float2(q_rows[i]), kept[j][i], q_sum);
      }
    }
  } else {
    UNROLL for (uint j = 0; j < kScanRows / 4; ++j) {
      const float4 k_rows = rows[kLanes * j], q_rows = rows[kRows / 4 + kLanes * j];
      float4 factor = scalar_decay;
      if constexpr (kKind == SCAN_CHANNELS) factor = rows[kRows / 2 + kLanes * j];
      UNROLL for (uint i = 0; i < 4; ++i) {
        kept[j][i] *= factor[i];
        k_sum = fma(float2(k_rows[i]), kept[j][i], k_sum);
        q_sum = fma(float2(q_rows[i]), kept[j][i], q_sum);
      }
    }
  }
  UNROLL for (uint d = 1; d < kLanes; d *= 2) {
    UNROLL for (uint c = 0; c < kScanColumns; ++c) {
      if constexpr (kKind != SCAN_PLAIN) k_sum[c] += simd_shuffle_xor(k_sum[c], ushort(d));
      q_sum[c] += simd_shuffle_xor(q_sum[c], ushort(d));
    }
  }
  float2 result = token->q_scale * q_sum + own_skip * value;
  if constexpr (kKind != SCAN_PLAIN) {
    const float2 written = (value - k_scale * k_sum) * own_beta;
    const float2 scaled = k_scale * written;
    UNROLL for (uint j = 0; j < kScanRows / 4; ++j) {
      const float4 k_rows = same_rows[kLanes * j];
      UNROLL for (uint i = 0; i < 4; ++i) kept[j][i] = fma(float2(k_rows[i]), scaled, kept[j][i]);
    }
    result += token->q_dot_k * written;
  }
  return result;
}

// A head's state, which stays in registers for all tokens: kLanes lanes share kScanColumns columns, and of
// every 4 kLanes rows lane r has those from 4 r on. A threadgroup stages some tokens of q and k at a time,
// normed, as floats, and their decays, so that the loop over tokens has no barrier and no conversion. Nothing
// that a token does depends on its place in a block or on the call's first token: wherever a prompt is cut,
// the state has the same bits. (A decay folded into a factor of the whole state takes 3 instructions an
// element instead of 4, and shows the cut.) Without the delta rule, and with it, k S and q S of the old state
// are summed in one pass: q S' = q S + (q k) u. Grid: (threadgroups of a head, heads). A norm needs all
// columns of a head, so that one threadgroup takes them, as many at a time as it has simdgroups. So it does
// where tokens are pending, which it reads before it keeps those of this call in their place.
template <typename T, uint kLanes, int kKind>
[[kernel, max_total_threads_per_threadgroup(kScanSimdgroups* kSimdWidth)]] void linear_attention(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]], device const uchar* beta [[buffer(4)]],
    device const uchar* a_log [[buffer(5)]], device const uchar* dt_bias [[buffer(6)]],
    device const uchar* skip [[buffer(7)]], device float* state [[buffer(8)]], device T* output [[buffer(9)]],
    device const T* gate [[buffer(10)]], device const uchar* norm_weight [[buffer(11)]],
    device float* pending [[buffer(12)]], device const int* counts [[buffer(13)]],
    constant LinearAttentionParams& params [[buffer(14)]], uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]], LANES, uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint kRows = kLanes * kScanRows;  // of the state, those behind key_width are zero
  constexpr uint kTokens = kRows <= 128 ? kScanTokens : kScanTokens / 2;  // in up to 24 KB
  constexpr uint kStep = kSimdWidth / kLanes * kScanColumns;              // columns of a simdgroup
  constexpr bool kChannels = kKind == SCAN_CHANNELS;
  typedef ScanToken<kRows, kChannels> Token;
  threadgroup Token staged[kTokens];
  const uint batch = group.y / params.heads, head = group.y % params.heads;
  const uint key_head = head / (params.heads / params.key_heads), part = lane % kLanes;
  const float rate = params.has_a_log != 0 ? precise::exp(load_one(a_log, params.a_log_dtype, head)) : 1.0f;
  const float own_skip = params.has_skip != 0 ? load_one(skip, params.skip_dtype, head) : 0.0f;
  float shift = 0.0f;
  if (!kChannels && params.has_dt_bias != 0) shift = load_one(dt_bias, params.dt_bias_dtype, head);
  const ScanInputs<T> inputs = {q, k, g, beta, dt_bias, batch, head, key_head, rate, shift};
  state += batch * params.state_batch_stride + head * params.state_head_stride;
  device T* results = output + (ulong(batch) * params.tokens * params.heads + head) * params.value_width;
  const uint result_stride = params.heads * params.value_width;

  for (uint start = group.x * simdgroups * kStep; start < params.value_width;
       start += groups.x * simdgroups * kStep) {
    const uint simdgroup_start = start + simdgroup * kStep;
    const ScanColumns own = columns_of<kLanes>(state, simdgroup_start, lane, params);
    float2 kept[kScanRows / 4][4];
    move_state<true, kLanes>(kept, own, params);
    const uint first_column = min(own.column, params.value_width - 1), second = own.is_own[1] ? 1 : 0;
    // The value of the next token is loaded while the state takes in this one.
    device const T* values = v + token_start(params.v, batch, 0, head);
    T next[2] = {T(0.0f), T(0.0f)};
    if (params.tokens != 0) {
      next[0] = values[first_column];
      next[1] = values[first_column + second];
    }
    // A lane writes one column: the first lanes that share some write them.
    const uint written_column = own.column + part;
    const bool writes = part < kScanColumns && written_column < params.value_width;
    uint waiting = count_of(counts, params.pending, batch);
    for (uint first = 0, count; waiting != 0 || first < params.tokens; first += count) {
      // Tokens that are kept are staged together.
      count = min(kTokens - waiting, params.tokens - first);
      if (params.keep != 0 && waiting + params.tokens > kTokens) count = 0;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint t = simdgroup; t < waiting + count; t += simdgroups) {
        if (t < waiting) {
          PendingTokens<kRows, kChannels>(pending, group.y, params).stage(t, staged[t], lane, params);
        } else {
          stage_token<kRows, kKind>(first + t - waiting, staged[t], inputs, lane, params);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint t = 0; t < waiting; ++t) {
        const PendingTokens<kRows, kChannels> held(pending, group.y, params);
        device const float* value = held.row(t) + params.key_width + anew(first_column, lane);
        take_in<kLanes, kKind>(kept, staged[t], float2(value[0], value[second]), part);
      }
      if (params.keep != 0 && waiting != 0) {
        move_state<false, kLanes>(kept, columns_of<kLanes>(state, simdgroup_start, anew(lane, lane), params),
                                  params);
      }
      // Offsets from a block's first token fit into 32 bits.
      device const T* block_values = values + first * params.v.token;
      device T* block_results = results + ulong(first) * result_stride;
      uint next_value = first_column, result_place = written_column;
      threadgroup const Token* token = staged + waiting;
      threadgroup const float4* rows = token->key + part;
      // The second time that a token's keys are read. The compiler does not know that `zero` is 0: it would
      // keep them in 16 registers from the first time on.
      threadgroup const float4* same_rows = rows + staged[0].zero;
      for (uint t = 0; t < count; ++t) {
        const float2 value = float2(float(next[0]), float(next[1]));
        if (first + t + 1 < params.tokens) next_value += uint(params.v.token);
        next[0] = block_values[next_value];
        next[1] = block_values[next_value + second];
        const float2 result = take_token<kLanes, kKind>(kept, token, rows, same_rows, value, own_skip);
        if (writes) block_results[result_place] = T(part == 0 ? result.x : result.y);
        result_place += result_stride;
        rows += sizeof(Token) / sizeof(float4);
        same_rows += sizeof(Token) / sizeof(float4);
        ++token;
      }
      waiting = 0;
    }
    if (params.keep == 0) {
      move_state<false, kLanes>(kept, columns_of<kLanes>(state, simdgroup_start, anew(lane, lane), params),
                                params);
    }
  }
  if (params.keep != 0) {
    threadgroup_barrier(mem_flags::mem_device);  // those that were pending have been read
    const uint same = anew(lane, lane), right = count_of(counts, params.pending, batch);
    threadgroup const Token* own = staged + (right + params.tokens > kTokens ? 0 : right);
    const PendingTokens<kRows, kChannels> held(pending, group.y, params);
    for (uint t = simdgroup; t < params.tokens; t += simdgroups) {
      held.keep(t, own[t], v + token_start(params.v, batch, t, head), same, params);
    }
  }
  if (params.has_norm == 0) return;
  threadgroup_barrier(mem_flags::mem_device);
  for (uint token = simdgroup; token < params.tokens; token += simdgroups) {
    norm_and_gate(results + ulong(token) * result_stride, gate + token_start(params.gate, batch, token, head),
                  norm_weight, params, lane);
  }
}

// Values of a channel for some tokens.
template <typename T, uint kTokens>
struct ChannelTokens {
  T x[kTokens], step[kTokens], gate[kTokens];
};

// A channel's places in the rows of a token.
template <typename T>
struct ChannelRows {
  device const T *x, *step, *gate;

  // Tokens from number `first` after that one on.
  template <uint kTokens>
  ChannelTokens<T, kTokens> load(uint first, constant SelectiveScanParams& params) const {
    ChannelTokens<T, kTokens> tokens;
    UNROLL for (uint i = 0; i < kTokens; ++i) {
      tokens.x[i] = x[(first + i) * params.x.token];
      tokens.step[i] = step[(first + i) * params.step.token];
      tokens.gate[i] = gate[(first + i) * params.gate.token];
    }
    return tokens;
  }
  void advance(uint tokens, constant SelectiveScanParams& params) {
    x += tokens * params.x.token;
    step += tokens * params.step.token;
    gate += tokens * params.gate.token;
  }
};

// Half of B and of C of a token.
struct StagedToken {
  float4 b[kSelectiveStates / 8];  // times ln(2)
  float4 c[kSelectiveStates / 8];
};

// Half of the states of two neighbouring channels, the lane's own and the next lane's, whose lane has the
// other halves.
struct ChannelStates {
  float rates[2][kSelectiveStates / 2];
  float kept[2][kSelectiveStates / 2];

  // States of a channel. `left` is how many there are from the lane's first on.
  template <bool kWhole>
  void load(uint channel, device const uchar* a_log, ulong first, device const float* state, int left,
            constant SelectiveScanParams& params) {
    Pack<kSelectiveStates / 2> logs;
    if constexpr (kWhole) logs = load_row<kSelectiveStates / 2>(a_log, params.a_log_dtype, first);
    UNROLL for (int n = 0; n < int(kSelectiveStates) / 2; ++n) {
      if constexpr (!kWhole) logs.v[n] = n < left ? load_one(a_log, params.a_log_dtype, first + n) : 0.0f;
      rates[channel][n] = -precise::exp(logs.v[n]);
      kept[channel][n] = kWhole || n < left ? state[n * params.state.head] : 0.0f;
    }
  }
  template <bool kWhole>
  void store(uint channel, device float* state, int left, constant SelectiveScanParams& params) const {
    UNROLL for (int n = 0; n < int(kSelectiveStates) / 2; ++n) {
      if (kWhole || n < left) state[n * params.state.head] = kept[channel][n];
    }
  }
  void store(uint place, device float* state, constant SelectiveScanParams& params) const;

  // Step of a token for both channels; `octaves` is the own one's step, times log2(e), as exp2 takes an
  // instruction less than exp. Returns: the own one's C . state.
  float take(float octaves, float x, threadgroup const StagedToken& token) {
    const float written = octaves * x;
    const float other_octaves = simd_shuffle_xor(octaves, ushort(1));
    const float other_written = simd_shuffle_xor(written, ushort(1));
    const float other_sum = take(1, other_octaves, other_written, token, 0.0f);
    return take(0, octaves, written, token, simd_shuffle_xor(other_sum, ushort(1)));
  }
  float take(uint channel, float octaves, float written, threadgroup const StagedToken& token, float sum) {
    UNROLL for (uint j = 0; j < kSelectiveStates / 8; ++j) {
      const float4 b = token.b[j], c = token.c[j];
      UNROLL for (uint i = 0; i < 4; ++i) {
        const uint n = 4 * j + i;
        const float decay = precise::exp2(rates[channel][n] * octaves);
        kept[channel][n] = fma(kept[channel][n], decay, written * b[i]);
        sum = fma(kept[channel][n], c[i], sum);
      }
    }
    return sum;
  }
};

// Half of the states of a channel, those from number `first` on: where they start, and how many there are.
struct HalfOfChannel {
  uint channel, first;
  ulong start;
  int left;
};

// Input of the lane's own channel, or with `other` 1 of that of the lane beside it. Past the last channel the
// last one is read again, and nothing is left to store.
inline HalfOfChannel half_of(uint place, uint other, constant SelectiveScanParams& params) {
  constexpr uint kHalf = kSelectiveStates / 2;
  const uint channel = min(place ^ other, params.channels - 1), first = kHalf * (place % 2);
  return {channel, first, channel * params.state.token + first * params.state.head,
          (place ^ other) < params.channels ? int(params.states) - int(first) : 0};
}

inline void ChannelStates::store(uint place, device float* state,
                                 constant SelectiveScanParams& params) const {
  const uint same = anew(place, place % kSimdWidth);
  UNROLL for (uint i = 0; i < 2; ++i) {
    const HalfOfChannel of_lane = half_of(same, i, params);
    if (of_lane.left >= int(kSelectiveStates) / 2) {
      store<true>(i, state + of_lane.start, of_lane.left, params);
    } else {
      store<false>(i, state + of_lane.start, of_lane.left, params);
    }
  }
}

// softplus with logarithms and powers of 2: log2(1 + exp2(x)).
inline float softplus_in_octaves(float x) {
  const float y = precise::exp2(-fabs(x)), u = 1.0f + y;
  return max(x, 0.0f) + fma(y - (u - 1.0f), M_LOG2E_F, precise::log2(u));
}

// Takes tokens in, and writes their results from the place of token number `first` on.
template <uint kTokens, typename T>
inline void scan_tokens(thread ChannelStates& states, ChannelTokens<T, kTokens> tokens, uint first,
                        threadgroup const StagedToken* staged, float shift, float skip, device T* results,
                        bool is_channel, constant SelectiveScanParams& params) {
  float sums[kTokens];
  UNROLL for (uint i = 0; i < kTokens; ++i) {
    const float x = float(tokens.x[i]);
    const float octaves = softplus_in_octaves(fma(float(tokens.step[i]), M_LOG2E_F, shift));
    sums[i] = fma(skip, x, states.take(octaves, x, staged[first + i]));
  }
  if (params.has_gate != 0) {
    UNROLL for (uint i = 0; i < kTokens; ++i) {
      const float gate = float(tokens.gate[i]);
      sums[i] = sums[i] * gate / (1.0f + precise::exp(-gate));
    }
  }
  if (is_channel) {
    UNROLL for (uint i = 0; i < kTokens; ++i) results[(first + i) * params.channels] = T(sums[i]);
  }
}

// Inputs of a group's tokens that are pending, one behind the other: x of its channels, their octaves, and B.
struct PendingScan {
  device float* rows;
  uint width;

  PendingScan(device float* pending, ulong group, constant SelectiveScanParams& params) {
    width = 2 * kSelectiveThreads + params.states;
    rows = pending + group * params.pending * width;
  }

  // Takes the first tokens in. `staged` has room for them.
  void take_in(thread ChannelStates& states, uint tokens,
               threadgroup StagedToken (&staged)[2][kSelectiveTokens], uint thread_index,
               constant SelectiveScanParams& params) const {
    constexpr uint kHalf = kSelectiveStates / 2;
    for (uint i = thread_index; i < tokens * kSelectiveStates; i += kSelectiveThreads) {
      const uint t = i / kSelectiveStates, n = i % kSelectiveStates;
      threadgroup float* target = reinterpret_cast<threadgroup float*>(&staged[n / kHalf][t]) + n % kHalf;
      target[0] = n < params.states ? M_LN2_F * rows[t * width + 2 * kSelectiveThreads + n] : 0.0f;
      target[kHalf] = 0.0f;  // of a result, which nothing reads
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = 0; t < tokens; ++t) {
      device const float* own = rows + t * width + thread_index;
      states.take(own[kSelectiveThreads], own[0], staged[thread_index % 2][t]);
    }
  }

  // Keeps tokens of a channel, and a part of B.
  template <typename T>
  void keep(device const T* x, device const T* step, device const T* b, float shift, bool is_channel,
            uint thread_index, constant SelectiveScanParams& params) const {
    for (uint t = 0; t < params.tokens; ++t) {
      device float* own = rows + t * width;
      if (is_channel) {
        const float octaves = fma(float(step[t * params.step.token]), M_LOG2E_F, shift);
        own[thread_index] = float(x[t * params.x.token]);
        own[kSelectiveThreads + thread_index] = softplus_in_octaves(octaves);
      }
      if (thread_index < params.states) {
        own[2 * kSelectiveThreads + thread_index] =
            float(b[t * params.b.token + thread_index * params.b.head]);
      }
    }
  }
};

// Mamba-1. Two neighbouring lanes keep the states of two channels in registers for all tokens: a lane has
// half of the states of both, so that it reads B and C of a token once for two channels, and computes the
// step, the gate and the result of one. A threadgroup stages B and C of some tokens at a time. Tokens that
// are pending it takes in first; each group of channels has their B for itself, and reads it before it keeps
// that of this call in its place. Grid: (channels, batch).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSelectiveThreads)]] void selective_scan(
    device const T* x [[buffer(0)]], device const T* step [[buffer(1)]], device const T* b [[buffer(2)]],
    device const T* c [[buffer(3)]], device const uchar* a_log [[buffer(4)]],
    device const uchar* dt_bias [[buffer(5)]], device const uchar* skip [[buffer(6)]],
    device const T* gate [[buffer(7)]], device float* state [[buffer(8)]], device T* output [[buffer(9)]],
    device float* pending [[buffer(10)]], device const int* counts [[buffer(11)]],
    constant SelectiveScanParams& params [[buffer(12)]], uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kHalf = kSelectiveStates / 2, kUnroll = kSelectiveUnroll;
  threadgroup StagedToken staged[2][kSelectiveTokens];
  const uint place = group.x * kSelectiveThreads + thread_index, part = thread_index % 2;
  const bool is_channel = place < params.channels;
  const uint channel = min(place, params.channels - 1);
  const ulong batch = group.y;
  ChannelRows<T> rows = {x + batch * params.x.batch + channel * params.x.head,
                         step + batch * params.step.batch + channel * params.step.head,
                         gate + batch * params.gate.batch + channel * params.gate.head};
  device T* results = output + batch * params.tokens * params.channels + channel;
  const float factor = params.has_skip != 0 ? load_one(skip, params.skip_dtype, channel) : 0.0f;
  float shift = 0.0f;
  if (params.has_dt_bias != 0) shift = M_LOG2E_F * load_one(dt_bias, params.dt_bias_dtype, channel);

  state += batch * params.state.batch;
  ChannelStates states;
  UNROLL for (uint i = 0; i < 2; ++i) {
    const HalfOfChannel of_lane = half_of(place, i, params);
    const ulong log = ulong(of_lane.channel) * params.states + of_lane.first;
    if (of_lane.left >= int(kHalf)) {
      states.load<true>(i, a_log, log, state + of_lane.start, of_lane.left, params);
    } else {
      states.load<false>(i, a_log, log, state + of_lane.start, of_lane.left, params);
    }
  }

  const PendingScan held(pending, batch * groups.x + group.x, params);
  const uint right = count_of(counts, params.pending, batch);
  if (right != 0) {
    held.take_in(states, right, staged, thread_index, params);
    if (params.keep != 0) states.store(place, state, params);
  }
  if (params.keep != 0) {
    threadgroup_barrier(mem_flags::mem_device);  // those that were pending have been read
    held.keep(x + batch * params.x.batch + channel * params.x.head,
              step + batch * params.step.batch + channel * params.step.head, b + batch * params.b.batch,
              shift, is_channel, thread_index, params);
  }

  // Element that a thread stages: a state of B or of C, of tokens kStagedRows apart.
  constexpr uint kStagedRows = kSelectiveThreads / (2 * kSelectiveStates);
  const uint n = thread_index % kSelectiveStates, row = thread_index / kSelectiveStates;
  const bool is_c = row % 2 != 0;
  device const T* source =
      is_c ? c + batch * params.c.batch + n * params.c.head : b + batch * params.b.batch + n * params.b.head;
  const ulong stride = is_c ? params.c.token : params.b.token;
  const float unit = is_c ? 1.0f : M_LN2_F;

  // Each half of 2 * kUnroll tokens is loaded while the states take in the one before it.
  ChannelTokens<T, kUnroll> tokens;
  if (params.tokens >= 2 * kUnroll) tokens = rows.template load<kUnroll>(0, params);
  for (uint first = 0; first < params.tokens; first += kSelectiveTokens) {
    const uint count = min(kSelectiveTokens, params.tokens - first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = row / 2; t < count; t += kStagedRows) {
      threadgroup float* target = reinterpret_cast<threadgroup float*>(&staged[n / kHalf][t]);
      target[(is_c ? kHalf : 0) + n % kHalf] =
          n < params.states ? unit * float(source[(first + t) * stride]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup const StagedToken* token = staged[part];
    uint t = 0;
    for (; t + 2 * kUnroll <= count; t += 2 * kUnroll) {
      const ChannelTokens<T, kUnroll> next = rows.template load<kUnroll>(kUnroll, params);
      scan_tokens(states, tokens, 0, token, shift, factor, results, is_channel, params);
      rows.advance(2 * kUnroll, params);
      if (first + t + 4 * kUnroll <= params.tokens) tokens = rows.template load<kUnroll>(0, params);
      scan_tokens(states, next, kUnroll, token, shift, factor, results, is_channel, params);
      token += 2 * kUnroll;
      results += 2 * kUnroll * params.channels;
    }
    for (; t < count; ++t) {
      const ChannelTokens<T, 1> one = rows.template load<1>(0, params);
      scan_tokens(states, one, 0, token, shift, factor, results, is_channel, params);
      rows.advance(1, params);
      ++token;
      results += params.channels;
    }
  }
  if (params.keep == 0) states.store(place, state, params);
}
