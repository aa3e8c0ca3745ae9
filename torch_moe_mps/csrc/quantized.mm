#include <ATen/core/Tensor.h>

#include "packed_matrix.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

Tensor expert_qmm(const Tensor& x, const Tensor& packed, const Tensor& scales, const OptionalTensor& biases,
                  const Tensor& ids, std::string_view format, const OptionalTensor& bias) {
  const auto dtype = compute_dtype(x.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix = packed_matrix(packed, scales, biases, weight_format(format), bias, dtype);
  return in_dtype(project_slots(in_dtype(x, dtype), matrix, ids), x.scalar_type());
}

Tensor moe_experts_quantized(const Tensor& x, const Tensor& gate_up_packed, const Tensor& gate_up_scales,
                             const OptionalTensor& gate_up_biases, const Tensor& down_packed,
                             const Tensor& down_scales, const OptionalTensor& down_biases, const Tensor& ids,
                             const Tensor& weights, std::string_view format,
                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                             std::string_view activation, std::optional<double> alpha,
                             std::optional<double> limit, bool gated, bool interleaved,
                             const OptionalTensor& shared_gate, const OptionalTensor& shared_out,
                             const OptionalTensor& residual, bool gate_is_logit,
                             std::optional<std::string_view> down_format, const OptionalTensor& norm_weight,
                             double norm_eps, double norm_offset) {
  const auto [dtype, gate_up, down] =
      gated_matrices(x.scalar_type(), {gate_up_packed, gate_up_scales, gate_up_biases, gate_up_bias}, format,
                     {down_packed, down_scales, down_biases, down_bias}, down_format);
  const ExpertSum sum{weights.contiguous(), contiguous(shared_gate), converted(shared_out, dtype),
                      converted(residual, dtype), gate_is_logit};
  const Tensor out =
      apply_experts(in_dtype(x, dtype), input_norm(norm_weight, norm_eps, norm_offset), gate_up, down, ids,
                    activation_of(activation, alpha, limit, gated, interleaved), sum);
  return in_dtype(out, x.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<expert_qmm>(m, "expert_qmm");
  implement<moe_experts_quantized>(m, "moe_experts_quantized");
}

}  // namespace moe_mps
