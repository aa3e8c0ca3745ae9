#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "expert_run.h"
#include "formats.h"
#include "signature.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct QuantizedWeight {
  const Tensor& packed;
  const Tensor& scales;
  const OptionalTensor& biases;
};

// The kernels take scales of the activations' dtype. Another one is widened along with the activations, which
// is right but reads the scales once more in every call: `dtype` is then float32.
ExpertMatrix quantized_matrix(const QuantizedWeight& weight, const OptionalTensor& bias, int64_t bits,
                              int64_t group_size, std::string_view mode, c10::ScalarType dtype) {
  if (!weight.packed.is_contiguous() || !is_aligned(weight.packed)) warn_of_copy(weight.packed);
  const WeightFormat format{std::string(mode), bits, group_size};
  ExpertMatrix matrix{quantized_library(format, dtype), aligned(weight.packed)};
  matrix.scales = weight.scales.contiguous();
  if (matrix.scales.scalar_type() != at::kByte) matrix.scales = matrix.scales.to(dtype);
  matrix.biases = matrix.scales;
  if (weight.biases.has_value() && weight.biases->defined())
    matrix.biases = weight.biases->contiguous().to(dtype);
  matrix.bias = contiguous(bias);
  matrix.experts = weight.packed.size(0);
  matrix.rows = weight.packed.size(1);
  matrix.inputs = weight.packed.size(2) * 32 / bits;
  return matrix;
}

c10::ScalarType compute_dtype(const Tensor& x, const Tensor& scales, const Tensor& more_scales) {
  for (const Tensor& each : {scales, more_scales}) {
    if (each.scalar_type() != at::kByte && each.scalar_type() != x.scalar_type()) return at::kFloat;
  }
  return x.scalar_type();
}

OptionalTensor converted(const OptionalTensor& tensor, c10::ScalarType dtype) {
  const OptionalTensor rows = contiguous(tensor);
  return rows ? OptionalTensor(rows->to(dtype)) : rows;
}

Tensor expert_qmm(const Tensor& x, const Tensor& packed, const Tensor& scales, const OptionalTensor& biases,
                  const Tensor& ids, int64_t bits, int64_t group_size, std::string_view mode,
                  const OptionalTensor& bias) {
  check_call("expert_qmm", x, packed, scales, biases, ids, bits, group_size, mode, bias);
  const auto dtype = compute_dtype(x, scales, scales);
  const ExpertMatrix matrix = quantized_matrix({packed, scales, biases}, bias, bits, group_size, mode, dtype);
  return project_slots(x.to(dtype), matrix, ids).to(x.scalar_type());
}

Tensor moe_experts_quantized(const Tensor& x, const Tensor& gate_up_packed, const Tensor& gate_up_scales,
                             const OptionalTensor& gate_up_biases, const Tensor& down_packed,
                             const Tensor& down_scales, const OptionalTensor& down_biases, const Tensor& ids,
                             const Tensor& weights, int64_t bits, int64_t group_size, std::string_view mode,
                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                             std::string_view activation, std::optional<double> alpha,
                             std::optional<double> limit, bool gated, bool interleaved,
                             const OptionalTensor& shared_gate, const OptionalTensor& shared_out,
                             const OptionalTensor& residual, bool gate_is_logit) {
  check_call("moe_experts_quantized", x, gate_up_packed, gate_up_scales, gate_up_biases, down_packed,
             down_scales, down_biases, ids, weights, bits, group_size, mode, gate_up_bias, down_bias,
             activation, alpha, limit, gated, interleaved, shared_gate, shared_out, residual, gate_is_logit);
  const auto dtype = compute_dtype(x, gate_up_scales, down_scales);
  const ExpertMatrix gate_up = quantized_matrix({gate_up_packed, gate_up_scales, gate_up_biases},
                                                gate_up_bias, bits, group_size, mode, dtype);
  const ExpertMatrix down =
      quantized_matrix({down_packed, down_scales, down_biases}, down_bias, bits, group_size, mode, dtype);
  const ExpertSum sum{weights.contiguous(), contiguous(shared_gate), converted(shared_out, dtype),
                      converted(residual, dtype), gate_is_logit};
  return apply_experts(x.to(dtype), gate_up, down, ids,
                       activation_of(activation, alpha, limit, gated, interleaved), sum)
      .to(x.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(moe_mps, MPS, m) {
  m.impl("expert_qmm", expert_qmm);
  m.impl("moe_experts_quantized", moe_experts_quantized);
}

TORCH_LIBRARY_IMPL(moe_mps, AutogradMPS, m) {
  m.impl("expert_qmm", torch::autograd::autogradNotImplementedFallback());
  m.impl("moe_experts_quantized", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace moe_mps
