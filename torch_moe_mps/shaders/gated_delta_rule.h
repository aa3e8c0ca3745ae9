// Linear attention by the gated delta rule
#pragma once
#include "common/activations.h"
#include "common/dtypes.h"
#include "common/pending.h"
#include "common/simdgroups.h"
#include "geometry/gated_delta_rule.h"
#include "params/gated_delta_rule.h"

// The recurrence: what a token's keys do to the state.
#define SCAN_PLAIN 0     // S = decay S + k u
#define SCAN_DELTA 1     // u is what the state lacks
#define SCAN_CHANNELS 2  // the same, with a decay for each row

// The logarithm of a decay; `rate` is exp(A_log).
inline float log_decay(float g, float rate, float shift, constant GatedDeltaRuleParams& params) {
  if (params.decay == DECAY_SOFTPLUS) return -rate * softplus(g + shift);
  if (params.decay == DECAY_SIGMOID) return params.lower_bound * sigmoid(rate * (g + shift));
  return g;
}

inline float activated_beta(float beta, float shift, constant GatedDeltaRuleParams& params) {
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
                          constant GatedDeltaRuleParams& params, uint lane) {
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
                              constant GatedDeltaRuleParams& params) {
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
                       constant GatedDeltaRuleParams& params) {
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

  PendingTokens(device float* pending, ulong head, constant GatedDeltaRuleParams& params) {
    width = params.key_width + params.value_width + 2 + (kChannels ? params.key_width : 1);
    rows = pending + head * params.pending * width;
  }
  device float* row(uint token) const { return rows + token * width; }

  // Stages a token, by one simdgroup.
  void stage(uint token, threadgroup Token& target, uint lane, constant GatedDeltaRuleParams& params) const {
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
            constant GatedDeltaRuleParams& params) const {
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

// Takes a token that was pending in: the operations of `gated_delta_rule` in their order, without a result.
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
                        constant GatedDeltaRuleParams& params) {
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
[[kernel, max_total_threads_per_threadgroup(kScanSimdgroups* kSimdWidth)]] void gated_delta_rule(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]], device const uchar* beta [[buffer(4)]],
    device const uchar* a_log [[buffer(5)]], device const uchar* dt_bias [[buffer(6)]],
    device const uchar* skip [[buffer(7)]], device float* state [[buffer(8)]], device T* output [[buffer(9)]],
    device const T* gate [[buffer(10)]], device const uchar* norm_weight [[buffer(11)]],
    device float* pending [[buffer(12)]], device const int* counts [[buffer(13)]],
    constant GatedDeltaRuleParams& params [[buffer(14)]], uint2 group [[threadgroup_position_in_grid]],
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
