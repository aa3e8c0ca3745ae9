// Linear attention by the gated delta rule.
#pragma once
#include "common.h"

// The value of a channel at a position; the positions of the input follow those of the state.
template <typename T>
inline float conv_value(device const uchar* state, ulong state_start, device const T* x, ulong x_start,
                        uint position, constant ConvParams& params) {
  if (position >= params.length)
    return float(x[x_start + (position - params.length) * params.x_token_stride]);
  return load_one(state, params.state_dtype, state_start + position);
}

// A thread takes a channel. It reads the state for all sums before it writes the new one. The new state is
// written in ascending order, so that a position is read before it is overwritten.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kConvThreads)]] void conv_channels(
    device const T* x [[buffer(0)]], device uchar* state [[buffer(1)]],
    device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
    device T* output [[buffer(4)]], constant ConvParams& params [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint row = group * kConvThreads + thread_index;
  if (row >= params.rows) return;
  const uint batch = row / params.channels, channel = row % params.channels;
  const ulong x_start = batch * params.x_batch_stride + channel * params.x_channel_stride;
  const ulong state_start = ulong(row) * params.length;
  for (uint token = 0; token < params.tokens; ++token) {
    float sum = params.has_bias != 0 ? load_one(bias, params.bias_dtype, channel) : 0.0f;
    const uint first = params.length + token + 1 - params.width;
    for (uint i = 0; i < params.width; ++i) {
      const float factor = load_one(weight, params.weight_dtype, ulong(channel) * params.width + i);
      sum = fma(factor, conv_value(state, state_start, x, x_start, first + i, params), sum);
    }
    output[ulong(row) * params.tokens + token] = T(params.silu != 0 ? silu(sum) : sum);
  }
  for (uint i = 0; i < params.length; ++i) {
    const float moved = conv_value(state, state_start, x, x_start, params.tokens + i, params);
    store_any(state, params.state_dtype, state_start + i, moved);
  }
}

// What a head does at a token.
struct DeltaStep {
  float decay;
  float beta;
  float q_scale;
  float k_scale;
  float q_dot_k;  // times the scale
};

// Sums over a head of q and k. Every lane of every simdgroup gets the same values.
template <typename T>
inline DeltaStep delta_step(device const T* q, device const T* k, float g, float beta,
                            device const uchar* a_log, device const uchar* dt_bias, uint head,
                            constant DeltaParams& params, uint lane) {
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
  for (uint i = lane; i < params.key_width; i += kSimdWidth) {
    const float a = float(q[i]), b = float(k[i]);
    qq += a * a;
    kk += b * b;
    qk += a * b;
  }
  DeltaStep step;
  step.q_scale = params.scale;
  step.k_scale = 1.0f;
  if (params.has_l2norm != 0) {
    step.q_scale *= precise::rsqrt(simd_sum(qq) + params.l2norm_eps);
    step.k_scale = precise::rsqrt(simd_sum(kk) + params.l2norm_eps);
  }
  step.q_dot_k = simd_sum(qk) * step.q_scale * step.k_scale;
  if (params.has_a_log != 0) {
    const float shift = params.has_dt_bias != 0 ? load_one(dt_bias, params.dt_bias_dtype, head) : 0.0f;
    g = -precise::exp(load_one(a_log, params.a_log_dtype, head)) * softplus(g + shift);
  }
  step.decay = precise::exp(g);
  step.beta = params.beta_is_logit != 0 ? sigmoid(beta) : beta;
  return step;
}

// rms(row) * weight * silu(gate) of a head, in place, by one simdgroup.
template <typename T>
inline void norm_and_gate(device T* row, device const T* gate, device const uchar* weight,
                          constant DeltaParams& params, uint lane) {
  float squares = 0.0f;
  for (uint i = lane; i < params.value_width; i += kSimdWidth) squares += float(row[i]) * float(row[i]);
  const float inverse = precise::rsqrt(simd_sum(squares) / float(params.value_width) + params.norm_eps);
  for (uint i = lane; i < params.value_width; i += kSimdWidth) {
    const float factor = load_one(weight, params.norm_dtype, i) + params.norm_offset;
    row[i] = T(float(row[i]) * inverse * factor * silu(float(gate[i])));
  }
}

// A head's state in blocks of 32 columns: each lane takes one column, each simdgroup kDeltaRows rows, which
// stay in registers for all tokens. k S and q S of the old state are summed in one step, because the output
// is q S' = q S + (q k) delta: a token needs one barrier. Grid: (threadgroups of a head, heads). A norm needs
// all columns of a head, so that one threadgroup takes them, as many blocks at a time as it has simdgroups.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kDeltaSimdgroups* kSimdWidth)]] void delta_columns(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]], device const uchar* beta [[buffer(4)]],
    device const uchar* a_log [[buffer(5)]], device const uchar* dt_bias [[buffer(6)]],
    device float* state [[buffer(7)]], device T* output [[buffer(8)]], device const T* gate [[buffer(9)]],
    device const uchar* norm_weight [[buffer(10)]], constant DeltaParams& params [[buffer(11)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  // Two sums for each simdgroup and column. The steps alternate between the halves.
  threadgroup float partials[2][kDeltaSimdgroups][2][kSimdWidth];
  const uint batch = group.y / params.heads, head = group.y % params.heads;
  const uint key_head = head / (params.heads / params.key_heads);
  const uint of_block = (params.key_width + kDeltaRows - 1) / kDeltaRows, at_once = simdgroups / of_block;
  const uint first_of_block = simdgroup - simdgroup % of_block;
  const uint first = simdgroup % of_block * kDeltaRows;
  const uint rows = min(uint(kDeltaRows), params.key_width - first);
  uint step_number = 0;
  for (uint start = group.x * at_once; start * kSimdWidth < params.value_width; start += groups.x * at_once) {
    const uint column = (start + simdgroup / of_block) * kSimdWidth + lane;
    const bool is_column = column < params.value_width;
    device float* own = state + (ulong(group.y) * params.key_width + first) * params.value_width + column;
    float kept[kDeltaRows];
    UNROLL for (uint r = 0; r < kDeltaRows; ++r) {
      kept[r] = is_column && r < rows ? own[ulong(r) * params.value_width] : 0.0f;
    }
    for (uint token = 0; token < params.tokens; ++token) {
      const ulong position = ulong(batch) * params.tokens + token;
      device const T* q_row = q + (position * params.key_heads + key_head) * params.key_width;
      device const T* k_row = k + (position * params.key_heads + key_head) * params.key_width;
      const ulong value = position * params.heads + head;
      const float v_own = is_column ? float(v[value * params.value_width + column]) : 0.0f;
      const DeltaStep step =
          delta_step(q_row, k_row, load_one(g, params.g_dtype, value),
                     load_one(beta, params.beta_dtype, value), a_log, dt_bias, head, params, lane);
      // Lane r holds what row r of the simdgroup's rows is multiplied by.
      const bool is_row = lane < rows;
      const float q_lane = is_row ? float(q_row[first + lane]) * step.q_scale : 0.0f;
      const float k_lane = is_row ? float(k_row[first + lane]) * step.k_scale : 0.0f;
      float q_sum = 0.0f, k_sum = 0.0f;
      UNROLL for (uint r = 0; r < kDeltaRows; ++r) {
        kept[r] *= step.decay;
        q_sum = fma(simd_broadcast(q_lane, r), kept[r], q_sum);
        k_sum = fma(simd_broadcast(k_lane, r), kept[r], k_sum);
      }
      threadgroup float(*sums)[2][kSimdWidth] = partials[step_number++ % 2];
      sums[simdgroup][0][lane] = q_sum;
      sums[simdgroup][1][lane] = k_sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      q_sum = 0.0f;
      k_sum = 0.0f;
      for (uint s = first_of_block; s < first_of_block + of_block; ++s) {
        q_sum += sums[s][0][lane];
        k_sum += sums[s][1][lane];
      }
      const float delta = (v_own - k_sum) * step.beta;
      UNROLL for (uint r = 0; r < kDeltaRows; ++r) kept[r] = fma(simd_broadcast(k_lane, r), delta, kept[r]);
      if (simdgroup == first_of_block && is_column) {
        output[value * params.value_width + column] = T(fma(step.q_dot_k, delta, q_sum));
      }
    }
    UNROLL for (uint r = 0; r < kDeltaRows; ++r) {
      if (is_column && r < rows) own[ulong(r) * params.value_width] = kept[r];
    }
  }
  if (params.has_norm == 0) return;
  threadgroup_barrier(mem_flags::mem_device);
  for (uint token = simdgroup; token < params.tokens; token += simdgroups) {
    const ulong row = (ulong(batch) * params.tokens + token) * params.heads + head;
    norm_and_gate(output + row * params.value_width, gate + row * params.value_width, norm_weight, params,
                  lane);
  }
}
