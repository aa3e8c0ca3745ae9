#include <ATen/core/Tensor.h>

#include "matmul_run.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// The kernels read rows of inputs. `transposed` weights have them if their memory is that of the other
// layout.
MatrixStack dense_matrix(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool transposed) {
  const Tensor stored = transposed ? weight.mT() : weight;
  if (!stored.is_contiguous()) warn_of_copy(weight);
  MatrixStack matrix{{"experts", x.scalar_type()}, stored.contiguous()};
  matrix.scales = matrix.biases = matrix.packed;
  matrix.bias = contiguous(bias);
  matrix.experts = stored.size(0);
  matrix.rows = stored.size(1);
  matrix.inputs = stored.size(2);
  return matrix;
}

Tensor expert_mm(const Tensor& x, const Tensor& weight, const Tensor& ids, const OptionalTensor& bias,
                 bool transposed) {
  return project_slots(x, dense_matrix(x, weight, bias, transposed), ids);
}

Tensor moe_experts(const Tensor& x, const Tensor& gate_up_, const Tensor& down_, const Tensor& ids,
                   const Tensor& weights, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                   std::string_view activation, std::optional<double> alpha, std::optional<double> limit,
                   bool gated, bool interleaved, bool transposed, const OptionalTensor& shared_gate,
                   const OptionalTensor& shared_out, const OptionalTensor& residual, bool gate_is_logit,
                   const OptionalTensor& norm_weight, double norm_eps, double norm_offset) {
  const FeedForward experts{dense_matrix(x, gate_up_, gate_up_bias, transposed),
                            dense_matrix(x, down_, down_bias, transposed)};
  const ExpertSum sum{weights.contiguous(), contiguous(shared_gate), contiguous(shared_out),
                      contiguous(residual), gate_is_logit};
  return apply_experts(x, input_norm(norm_weight, norm_eps, norm_offset), experts, ids,
                       activation_of(activation, alpha, limit, gated, interleaved), sum);
}

}  // namespace

MOE_OPERATOR(expert_mm)
MOE_OPERATOR(moe_experts)

}  // namespace moe_mps
