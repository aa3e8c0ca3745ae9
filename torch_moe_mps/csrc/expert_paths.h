// How the experts run: the choice between the decode and the prefill kernels, and their dispatches.
// experts.mm and quantized.mm bring the weights in their formats.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../shaders/params.h"

namespace moe_mps {

// [E, rows, inputs] in one format; dense and `transposed`, [E, inputs, rows].
struct ExpertMatrix {
  const char* library;                // the .metal file with its kernels
  const char* format;                 // in the kernels' names; empty for dense
  at::Tensor packed, scales, biases;  // dense: the weight three times
  std::optional<at::Tensor> bias;     // of the layer, [E, rows]
  int64_t experts, rows, inputs;
  int64_t bits = 0;  // of an affine code; 0 for the other formats
  int64_t group_shift = 0;
  bool transposed = false;
};

struct Activation {
  uint32_t kind = ACTIVATION_NONE;
  float alpha = 0.0f;
  float limit = 0.0f;
  uint32_t row_layout = ROWS_PLAIN;
};

Activation activation_of(std::string_view name, std::optional<double> alpha, std::optional<double> limit,
                         bool gated, bool interleaved);

struct ExpertSum {
  at::Tensor weights;  // [T, K]
  std::optional<at::Tensor> shared_gate, shared_out, residual;
  bool gate_is_logit;
};

// A tensor whose first element lies at a multiple of 16 bytes, contiguous; the same one where it is so
// already.
at::Tensor aligned(const at::Tensor& tensor);
void warn_of_copy(const at::Tensor& weight);
bool is_aligned(const at::Tensor& tensor);

// expert_mm: out[T, K, rows] in one dispatch for few tokens, in two for many.
at::Tensor project_slots(const at::Tensor& x, const ExpertMatrix& matrix, const at::Tensor& ids);

// moe_experts: in two dispatches for few tokens, in four for many.
at::Tensor apply_experts(const at::Tensor& x, const ExpertMatrix& gate_up, const ExpertMatrix& down,
                         const at::Tensor& ids, const Activation& activation, const ExpertSum& sum);

}  // namespace moe_mps
