// The activation between the experts' matrices as a kernel of its own, and its gradient.
#pragma once
#include "common/vectors.h"
#include "geometry/combine.h"
#include "matmul/activations.h"
#include "matmul/common.h"

// The derivative of x * sigmoid(alpha * x).
inline float sigmoid_slope(float x, float alpha) {
  const float value = sigmoid(alpha * x);
  return value + alpha * x * value * (1.0f - value);
}

// The derivative of pointwise_activation().
inline float pointwise_slope(float x, uint activation) {
  if (activation == ACTIVATION_SILU) return sigmoid_slope(x, 1.0f);
  if (activation == ACTIVATION_GELU) {
    const float tail = 0.5f * erfc_positive(0.70710678f * fabs(x));
    return (x < 0.0f ? tail : 1.0f - tail) + x * 0.39894228f * precise::exp(-0.5f * x * x);
  }
  if (activation == ACTIVATION_GELU_TANH) {
    const float value = sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    return value + x * value * (1.0f - value) * 1.5957691216f * (1.0f + 0.134145f * x * x);
  }
  if (x <= 0.0f) return 0.0f;  // NaN is none of these
  return activation == ACTIVATION_RELU ? 1.0f : 2.0f * x;
}

// The gradients of gated_activation() with respect to the gate and the up, times `dy`.
inline float2 gated_gradient(float gate, float up, float dy, constant MatmulParams& params) {
  if (params.activation < ACTIVATION_SWIGLU_OAI) {
    return float2(dy * up * pointwise_slope(gate, params.activation),
                  dy * pointwise_activation(gate, params.activation));
  }
  const bool plain = params.activation != ACTIVATION_SWIGLU_OAI;
  const bool capped = params.activation == ACTIVATION_SILU_CAPPED;  // its limit is one of silu(gate)
  const float alpha = plain ? 1.0f : params.alpha, own = capped ? gate : at_most(gate, params.limit);
  const float factor = at_least(at_most(up, params.limit), -params.limit) + (plain ? 0.0f : 1.0f);
  const float acted = own * sigmoid(alpha * own);
  const bool beyond = (capped ? acted : gate) > params.limit;
  return float2(
      beyond ? 0.0f : dy * factor * sigmoid_slope(own, alpha),
      up > params.limit || up < -params.limit ? 0.0f : dy * (beyond && capped ? params.limit : acted));
}

// Grid of both: (rows, blocks of kActivationThreads columns of what the activation gives).
template <typename T>
[[kernel]] void expert_activation(device const T* rows [[buffer(0)]], device T* out [[buffer(1)]],
                                  constant MatmulParams& params [[buffer(2)]],
                                  uint2 group [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.y * kActivationThreads + thread_index;
  if (column >= params.outputs) return;
  device const T* row = rows + ulong(group.x) * params.rows;
  const float gate = float(row[weight_row(column, 0, params)]);
  const float value =
      params.row_layout == ROWS_PLAIN
          ? pointwise_activation(gate, params.activation)
          : gated_activation(gate, float(row[weight_row(column, 1, params)]), params.activation, params);
  out[ulong(group.x) * params.outputs + column] = T(value);
}

template <typename T>
[[kernel]] void expert_activation_backward(device const T* dy [[buffer(0)]],
                                           device const T* rows [[buffer(1)]], device T* out [[buffer(2)]],
                                           constant MatmulParams& params [[buffer(3)]],
                                           uint2 group [[threadgroup_position_in_grid]],
                                           uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.y * kActivationThreads + thread_index;
  if (column >= params.outputs) return;
  const ulong row = ulong(group.x) * params.rows;
  const ulong first = row + weight_row(column, 0, params), second = row + weight_row(column, 1, params);
  const float own = float(dy[ulong(group.x) * params.outputs + column]), gate = float(rows[first]);
  if (params.row_layout == ROWS_PLAIN) {
    out[first] = T(own * pointwise_slope(gate, params.activation));
    return;
  }
  const float2 both = gated_gradient(gate, float(rows[second]), own, params);
  out[first] = T(both.x);
  out[second] = T(both.y);
}
