// Runs the experts' plan: binds tensors to its steps and encodes them. The weights come from experts.mm and
// quantized.mm, in their formats.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../shaders/params.h"
#include "combine.h"
#include "matmul_plan.h"
#include "metal/encoder.h"
#include "metal/library.h"
#include "norms.h"
#include "routing.h"

namespace moe_mps {

// A stack of matrices in one format, [E, rows, inputs].
struct MatrixStack {
  Library library;                   // the kernels for its format and the dtype of the activations
  at::Tensor packed, scales, zeros;  // in a dense matrix all three are the weight
  OptionalTensor bias;               // the layer's bias, [E, rows]
  int64_t experts, rows, inputs;
  bool norms_inputs = true;  // for one token, a norm within the matmul costs less than a launch
};

struct FeedForward {
  MatrixStack gate_up, down;
};

struct Activation {
  uint32_t kind = ACTIVATION_NONE;
  float alpha = 0.0f;
  float limit = 0.0f;
  uint32_t row_layout = ROWS_PLAIN;
  int64_t activated = 0;  // the first so many outputs of plain rows; 0: all
  float factor = 1.0f;    // multiplies the input of a pointwise activation
};

Activation activation_of(std::string_view name, std::optional<double> alpha, std::optional<double> limit,
                         bool gated, bool interleaved);
template <>
struct GroupOf<Activation> : MadeBy<activation_of> {};

// An expert of every token, of the format and shape of the others.
struct SharedExpert {
  FeedForward matrices;
  Activation activation;  // with the row layout and the numbers of the others
};

// Adds to `commands`: out[..., outputs] = activation(norm(x[..., inputs]) times the matrix, of one expert) +
// residual; output n goes to column order[n]. The tensors are contiguous, x aligned, the matrix not empty.
void add_linear(Commands& commands, const at::Tensor& x, const std::optional<InputNorm>& norm,
                const MatrixStack& matrix, const Activation& activation, const OptionalTensor& residual,
                const OptionalTensor& order, const at::Tensor& out);

// The same of two matrices, one behind the other: a feed-forward network's outputs.
at::Tensor apply_mlp(const at::Tensor& x, const std::optional<InputNorm>& norm, const FeedForward& matrices,
                     const Activation& activation, const OptionalTensor& residual = std::nullopt);

// The library of a step's kernel, for weights of a stack.
Library library_of(const MatmulStep& step, const MatrixStack& matrix);

void warn_of_copy(const at::Tensor& weight);

// expert_mm: out[..., K, rows] in one dispatch for few tokens, in two for many.
at::Tensor project_pairs(const at::Tensor& x, const MatrixStack& matrix, const at::Tensor& ids);

// moe_experts: in two dispatches for few tokens, in four for many.
at::Tensor apply_experts(const at::Tensor& x, const std::optional<InputNorm>& norm,
                         const FeedForward& experts, const at::Tensor& ids, const Activation& activation,
                         const ExpertSum& sum);

// The same with the weights and ids that a router chooses, for one token within the first matmul, and with a
// shared expert.
at::Tensor apply_experts(const at::Tensor& x, const std::optional<InputNorm>& norm,
                         const FeedForward& experts, const Router& router,
                         const std::optional<SharedExpert>& shared, const Activation& activation,
                         ExpertSum sum);

}  // namespace moe_mps
