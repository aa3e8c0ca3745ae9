#include <ATen/core/Tensor.h>

#include "packed_matrix.h"
#include "register.h"
#include "tensors.h"
#include "transposed.h"

namespace moe_mps {
namespace {

using at::Tensor;

Tensor expert_qmm(const Tensor& x, const Tensor& ids, const Tensor& packed, const Tensor& scales,
                  const OptionalTensor& zeros, std::string_view format, const OptionalTensor& bias) {
  const auto dtype = compute_dtype(x.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix = packed_matrix(packed, scales, zeros, weight_format(format), bias, dtype);
  return in_dtype(project_pairs(in_dtype(x, dtype), matrix, ids), x.scalar_type());
}

Tensor _expert_qmm_transposed(const Tensor& dy, const Tensor& ids, const Tensor& packed, const Tensor& scales,
                              const OptionalTensor& zeros, std::string_view format, bool sums) {
  const auto dtype = compute_dtype(dy.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix = packed_matrix(packed, scales, zeros, weight_format(format), std::nullopt, dtype);
  return in_dtype(transposed_product(in_dtype(dy, dtype), matrix, ids, sums), dy.scalar_type());
}

Tensor _moe_experts_quantized(const Tensor& x, const OptionalTensor& weights, const OptionalTensor& ids,
                              const Packed& gate_up, const Packed& down, std::string_view format,
                              const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                              const Activation& activation, const Summands& around,
                              std::optional<std::string_view> down_format,
                              const std::optional<InputNorm>& norm, const std::optional<Router>& router,
                              const std::optional<Packed>& shared_gate_up,
                              const std::optional<Packed>& shared_down,
                              std::optional<std::string_view> shared_activation, bool has_identity,
                              bool weights_on_inputs) {
  const auto [dtype, experts] =
      feed_forward(x.scalar_type(), gate_up, down, format, down_format, gate_up_bias, down_bias);
  ExpertSum sum = around.with({}, dtype);
  sum.has_identity = has_identity;
  sum.weights_on_inputs = weights_on_inputs;
  const Tensor input = in_dtype(x, dtype);
  if (router) {
    std::optional<SharedExpert> shared;
    if (shared_gate_up) {
      shared = {feed_forward(x.scalar_type(), *shared_gate_up, *shared_down, format, down_format).second,
                activation};
      if (shared_activation) {
        shared->activation.kind =
            activation_of(*shared_activation, std::nullopt, std::nullopt, true, false).kind;
      }
    }
    return in_dtype(apply_experts(input, norm, experts, *router, shared, activation, sum), x.scalar_type());
  }
  sum.weights = weights->contiguous();
  return in_dtype(apply_experts(input, norm, experts, *ids, activation, sum), x.scalar_type());
}

Tensor moe_experts_quantized(const Tensor& x, const Tensor& weights, const Tensor& ids, const Packed& gate_up,
                             const Packed& down, std::string_view format, const OptionalTensor& gate_up_bias,
                             const OptionalTensor& down_bias, std::string_view activation,
                             std::optional<double> limit, bool interleaved,
                             std::optional<std::string_view> down_format) {
  const int64_t inner = down.packed.size(-1) * 32 / weight_format(down_format.value_or(format)).bits;
  const bool gated = gate_up.packed.size(-2) == 2 * inner;
  return _moe_experts_quantized(x, weights, ids, gate_up, down, format, gate_up_bias, down_bias,
                                activation_of(activation, std::nullopt, limit, gated, interleaved),
                                kNothingAdded, down_format, std::nullopt, std::nullopt, std::nullopt,
                                std::nullopt, std::nullopt, false, false);
}

}  // namespace

MOE_OPERATOR(expert_qmm)
MOE_OPERATOR(_expert_qmm_transposed)
MOE_OPERATOR(_moe_experts_quantized)
MOE_OPERATOR(moe_experts_quantized)

}  // namespace moe_mps
