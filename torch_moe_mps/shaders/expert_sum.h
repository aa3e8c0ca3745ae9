// Terms that are added to the sum over a token's experts.
#pragma once
#include "common/activations.h"
#include "common/dtypes.h"
#include "params/expert_sum.h"

// Factor of a token's shared expert.
inline float factor_of_shared(device const uchar* shared_gate, ulong token, ExpertSumParams params) {
  if (params.has_gate == 0) return 1.0f;
  const float gate = load_one(shared_gate, params.gate_dtype, token);
  return params.gate_is_logit != 0 ? sigmoid(gate) : gate;
}

// The shared expert and the residual.
template <typename T>
struct Addends {
  device const uchar* shared_gate;
  device const T* shared_out;
  device const T* residual;

  float add_to(float sum, uint token, uint column, uint columns, constant ExpertSumParams& params) const {
    const ulong index = ulong(token) * columns + column;
    if (params.has_shared != 0) {
      sum += factor_of_shared(shared_gate, token, params) * float(shared_out[index]);
    }
    if (params.has_residual != 0) sum += float(residual[index]);
    return sum;
  }

  float4 add_to(float4 sum, uint token, uint column, uint columns, constant ExpertSumParams& params) const {
    UNROLL for (uint i = 0; i < 4; ++i) sum[i] = add_to(sum[i], token, column + i, columns, params);
    return sum;
  }
};
