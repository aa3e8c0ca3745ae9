#include <ATen/core/Tensor.h>

#include "packed_matrix.h"
#include "register.h"
#include "tensors.h"
#include "transposed.h"

namespace moe_mps {
namespace {

using at::Tensor;

Tensor expert_qmm(const Tensor& x, const Tensor& packed, const Tensor& scales, const OptionalTensor& biases,
                  const Tensor& ids, std::string_view format, const OptionalTensor& bias) {
  const auto dtype = compute_dtype(x.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix = packed_matrix(packed, scales, biases, weight_format(format), bias, dtype);
  return in_dtype(project_slots(in_dtype(x, dtype), matrix, ids), x.scalar_type());
}

Tensor expert_qmm_transposed(const Tensor& dy, const Tensor& packed, const Tensor& scales,
                             const OptionalTensor& biases, const Tensor& ids, std::string_view format,
                             bool sums) {
  const auto dtype = compute_dtype(dy.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix =
      packed_matrix(packed, scales, biases, weight_format(format), std::nullopt, dtype);
  return in_dtype(transposed_product(in_dtype(dy, dtype), matrix, ids, sums), dy.scalar_type());
}

Tensor moe_experts_quantized(
    const Tensor& x, const Tensor& gate_up_packed, const Tensor& gate_up_scales,
    const OptionalTensor& gate_up_biases, const Tensor& down_packed, const Tensor& down_scales,
    const OptionalTensor& down_biases, const OptionalTensor& ids, const OptionalTensor& weights,
    std::string_view format, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
    std::string_view activation, std::optional<double> alpha, std::optional<double> limit, bool gated,
    bool interleaved, const OptionalTensor& shared_gate, const OptionalTensor& shared_out,
    const OptionalTensor& residual, bool gate_is_logit, std::optional<std::string_view> down_format,
    const OptionalTensor& norm_weight, double norm_eps, double norm_offset, const OptionalTensor& logits,
    int64_t top_k, std::string_view scoring, const OptionalTensor& router_bias, int64_t num_groups,
    int64_t top_groups, std::string_view group_score, std::optional<double> masked_score, bool bias_on_logits,
    bool norm_topk_prob, double router_norm_eps, double router_norm_min, double scaling_factor,
    const OptionalTensor& per_expert_scale, const OptionalTensor& shared_gate_up_packed,
    const OptionalTensor& shared_gate_up_scales, const OptionalTensor& shared_gate_up_biases,
    const OptionalTensor& shared_down_packed, const OptionalTensor& shared_down_scales,
    const OptionalTensor& shared_down_biases) {
  const auto [dtype, experts] =
      feed_forward(x.scalar_type(), {gate_up_packed, gate_up_scales, gate_up_biases, gate_up_bias}, format,
                   {down_packed, down_scales, down_biases, down_bias}, down_format);
  ExpertSum sum{
      {}, contiguous(shared_gate), converted(shared_out, dtype), converted(residual, dtype), gate_is_logit};
  const Tensor input = in_dtype(x, dtype);
  const auto norm = input_norm(norm_weight, norm_eps, norm_offset);
  const Activation act = activation_of(activation, alpha, limit, gated, interleaved);
  if (logits) {
    const Router router = router_of(*logits, top_k, scoring, router_bias, num_groups, top_groups, group_score,
                                    masked_score, bias_on_logits, norm_topk_prob, router_norm_eps,
                                    router_norm_min, scaling_factor, per_expert_scale);
    std::optional<FeedForward> shared;
    if (shared_gate_up_packed) {
      shared =
          feed_forward(x.scalar_type(),
                       {*shared_gate_up_packed, *shared_gate_up_scales, shared_gate_up_biases, std::nullopt},
                       format, {*shared_down_packed, *shared_down_scales, shared_down_biases, std::nullopt},
                       down_format)
              .second;
    }
    return in_dtype(apply_experts(input, norm, experts, router, shared, act, sum), x.scalar_type());
  }
  sum.weights = weights->contiguous();
  return in_dtype(apply_experts(input, norm, experts, *ids, act, sum), x.scalar_type());
}

}  // namespace

MOE_OPERATOR(expert_qmm)
MOE_OPERATOR(expert_qmm_transposed)
MOE_OPERATOR(moe_experts_quantized)

}  // namespace moe_mps
