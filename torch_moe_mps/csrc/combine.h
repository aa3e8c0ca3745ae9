// The weighted sum over a token's experts, as the experts' matmuls use it too.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "../shaders/params.h"
#include "groups.h"
#include "metal/encoder.h"

namespace moe_mps {

// sum over a token's experts + gate * shared_out + residual. All are contiguous.
struct ExpertSum {
  at::Tensor weights;  // [T, K]
  OptionalTensor shared_gate = {}, shared_out = {}, residual = {};
  bool gate_is_logit = false;
  bool has_identity = false;       // of experts: ids beyond them give shared_out, which is no summand then
  bool weights_on_inputs = false;  // of experts: the weights multiply their inputs, not their outputs
};

// Summands beside the experts' results as an operator is given them.
struct Summands {
  const OptionalTensor &shared_gate, &shared_out, &residual;
  bool gate_is_logit;

  // The sum in a dtype; the weights are contiguous.
  ExpertSum with(const at::Tensor& weights, c10::ScalarType dtype) const;
};
inline const OptionalTensor kNoTensor;
inline const Summands kNothingAdded{kNoTensor, kNoTensor, kNoTensor, false};
template <>
struct GroupOf<Summands>
    : MadeBy<aggregate<Summands, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool>> {
};

ExpertSumParams sum_params(const ExpertSum& sum);

// Binds the weights and what is added. `stand_in`, of the dtype of the result, takes the place of what is
// not.
Command& bind_sum(Command& command, const ExpertSum& sum, const at::Tensor& stand_in);

// Adds: output [rows, width] = the sum over expert_out [rows, count, width]. Both are contiguous.
void add_expert_sum(Commands& commands, const at::Tensor& expert_out, const at::Tensor& output);

}  // namespace moe_mps
