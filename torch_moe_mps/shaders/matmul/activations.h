// The activation between an expert's two matmuls, chosen at run time: the branch is uniform and taken once
// per output.
#pragma once
#include "common/activations.h"
#include "params/expert_sum.h"
#include "params/matmul.h"

// Metal has no erf. erfc(z) = t * P(t) * exp(-z * z) with t = 1 / (1 + 0.3 z): P is a least-squares fit in
// Chebyshev nodes, its relative error 2.4e-8 on 0 <= z <= 9.5, beyond which erfc is below the smallest normal
// float.
inline float erfc_positive(float z) {
  const float t = 1.0f / (1.0f + 0.3f * z);
  float p = -0.13065015f;
  p = fma(p, t, 0.49119918f);
  p = fma(p, t, -0.52430234f);
  p = fma(p, t, 0.56199099f);
  p = fma(p, t, -0.10493684f);
  p = fma(p, t, 0.2195282f);
  p = fma(p, t, 0.14709303f);
  p = fma(p, t, 0.17090168f);
  p = fma(p, t, 0.16917621f);
  return t * p * precise::exp(-z * z);
}

inline float gelu(float x) {
  const float tail = 0.5f * erfc_positive(0.70710678f * fabs(x));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// 0.5 * (1 + tanh(u)) is sigmoid(2u), which neither overflows nor cancels.
inline float gelu_tanh(float x) {
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

inline float pointwise_activation(float x, uint activation) {
  if (activation == ACTIVATION_NONE) return x;
  if (activation == ACTIVATION_SILU) return silu(x);
  if (activation == ACTIVATION_GELU) return gelu(x);
  if (activation == ACTIVATION_GELU_TANH) return gelu_tanh(x);
  const float positive = x < 0.0f ? 0.0f : x;  // keeps NaN
  return activation == ACTIVATION_RELU ? positive : positive * positive;
}

// NaN passes through, as through torch.clamp.
inline float at_most(float x, float limit) {
  return x > limit ? limit : x;
}
inline float at_least(float x, float limit) {
  return x < limit ? limit : x;
}

inline float gated_activation(float gate, float up, uint activation, constant MatmulParams& params) {
  if (activation == ACTIVATION_SWIGLU_OAI || activation == ACTIVATION_SILU_CLAMPED) {
    gate = at_most(gate, params.limit);
    up = at_least(at_most(up, params.limit), -params.limit);
    if (activation == ACTIVATION_SILU_CLAMPED) return silu(gate) * up;
    return (up + 1.0f) * (gate * sigmoid(params.alpha * gate));
  }
  if (activation == ACTIVATION_SILU_CAPPED) {
    return at_most(silu(gate), params.limit) * at_least(at_most(up, params.limit), -params.limit);
  }
  return pointwise_activation(gate, activation) * up;
}
