#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "bucket.h"
#include "matmul_run.h"
#include "metal/work.h"
#include "register.h"
#include "tensors.h"
#include "transposed.h"

namespace moe_mps {
namespace {

using at::Tensor;

// The kernels read rows of inputs. `transposed` weights have them if their memory is that of the other
// layout.
MatrixStack dense_matrix(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool transposed) {
  const Tensor stored = transposed ? weight.mT() : weight;
  if (!stored.is_contiguous()) warn_of_copy(weight);
  MatrixStack matrix{{"experts", x.scalar_type()}, stored.contiguous()};
  matrix.scales = matrix.zeros = matrix.packed;
  matrix.bias = contiguous(bias);
  matrix.experts = stored.size(0);
  matrix.rows = stored.size(1);
  matrix.inputs = stored.size(2);
  check_counted("a matrix", matrix.rows * matrix.inputs, stored.sizes());
  return matrix;
}

Tensor expert_mm(const Tensor& x, const Tensor& ids, const Tensor& weight, const OptionalTensor& bias,
                 bool transposed) {
  const Tensor other = transposed ? weight : weight.mT();  // [E, inputs, rows]
  if (!bias && other.is_contiguous() && !other.mT().is_contiguous()) {
    return transposed_product(x, dense_matrix(x, other, std::nullopt, false), ids);
  }
  return project_pairs(x, dense_matrix(x, weight, bias, transposed), ids);
}

Tensor _expert_outer(const Tensor& a_, const Tensor& b_, const Tensor& ids_, int64_t experts) {
  const int64_t left = a_.size(-1), right = b_.size(-1);
  const auto options = a_.options().dtype(at::kFloat);
  if (a_.numel() == 0 || b_.numel() == 0) return at::zeros({experts, left, right}, options);
  const Tensor a = aligned(a_), b = aligned(b_), ids = ids_.contiguous();
  const Tensor out = at::empty({experts, left, right}, options);
  const Buckets buckets = empty_buckets(ids.numel(), experts, ids.options());
  OuterParams params{};
  params.left = left;
  params.right = right;
  params.slots = ids.size(-1);
  params.right_per_pair = b.dim() > ids.dim();
  const int64_t squares = ceil_div(left, kOuterSide) * ceil_div(right, kOuterSide);
  Commands commands;
  add_bucket(commands, ids, experts, buckets);
  commands.add({"experts", a.scalar_type()}, "expert_outer")
      .bind(a, b, buckets.pair_order, buckets.offsets, out)
      .work(kIssueCyclesOfProduct * static_cast<double>(ids.numel()) * static_cast<double>(left * right),
            static_cast<double>(out.nbytes()))
      .params(params)
      .threadgroups({ceil_div(squares, kGemmSimdgroups), experts}, {kGemmSimdgroups * kSimdWidth});
  commands.encode();
  return out;
}

Tensor _moe_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up,
                    const Tensor& down, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                    const Activation& activation, bool transposed, const Summands& around,
                    const std::optional<InputNorm>& norm, bool has_identity) {
  const FeedForward experts{dense_matrix(x, gate_up, gate_up_bias, transposed),
                            dense_matrix(x, down, down_bias, transposed)};
  ExpertSum sum = around.with(weights.contiguous(), x.scalar_type());
  sum.has_identity = has_identity;
  return apply_experts(x, norm, experts, ids, activation, sum);
}

Tensor moe_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up,
                   const Tensor& down, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                   const Activation& activation, bool transposed) {
  return _moe_experts(x, weights, ids, gate_up, down, gate_up_bias, down_bias, activation, transposed,
                      kNothingAdded, std::nullopt, false);
}

}  // namespace

MOE_OPERATOR(expert_mm)
MOE_OPERATOR(_expert_outer)
MOE_OPERATOR(_moe_experts)
MOE_OPERATOR(moe_experts)

}  // namespace moe_mps
