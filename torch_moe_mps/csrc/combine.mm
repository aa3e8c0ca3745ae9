#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Threads that share a row of a weighted sum. With few columns in all, threadgroups are smaller, so that
// there are more of them. Untuned.
constexpr int64_t kSumThreads = 128, kSumThreadsFew = 32, kFewColumns = 16384;

Tensor silu_mul_stacked(const Tensor& gate_, const Tensor& up_) {
  const Tensor gate = gate_.contiguous(), up = up_.contiguous();
  Tensor output = at::empty(gate.sizes(), gate.options());
  if (output.numel() == 0) return output;
  SiluMulParams params{};
  params.count = output.numel();
  params.vectorised = rows_start_aligned(4, {gate, up, output});
  const int64_t per_group = kSiluThreads * (params.vectorised ? 4 : 1);
  Commands commands;
  commands.add({"combine", gate.scalar_type()}, "silu_mul_stacked")
      .bind(gate)
      .bind(up)
      .bind(output)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(output.numel(), per_group))}, {NSUInteger(kSiluThreads)});
  commands.encode();
  return output;
}

// The operands of a weighted sum, both contiguous: slots [rows, slots, width] and weights [rows, slots].
struct WeightedSum {
  Tensor slots, weights;
  OptionalTensor shared_gate, shared, residual;
  bool gate_is_logit = false;
  int64_t rows, count, width;
};

// output [rows, width] = sum + gate * shared + residual.
void encode_weighted_sum(const WeightedSum& sum, const Tensor& output) {
  WeightedSumParams params{};
  params.rows = sum.rows;
  params.slots = sum.count;
  params.width = sum.width;
  params.vectorised = rows_start_aligned(
      sum.width, {sum.slots, output, sum.shared.value_or(output), sum.residual.value_or(output)});
  params.weights_dtype = dtype_code(sum.weights);
  params.has_shared = sum.shared.has_value();
  params.has_gate = sum.shared_gate.has_value();
  params.gate_dtype = sum.shared_gate ? dtype_code(*sum.shared_gate) : DTYPE_FLOAT;
  params.gate_is_logit = sum.gate_is_logit;
  params.has_residual = sum.residual.has_value();

  const int64_t items = ceil_div(sum.width, params.vectorised ? 4 : 1);
  const int64_t most = sum.rows * sum.width <= kFewColumns ? kSumThreadsFew : kSumThreads;
  const int64_t threads = std::min(most, ceil_div(items, kSimdWidth) * kSimdWidth);
  Commands commands;
  commands.add({"combine", output.scalar_type()}, "weighted_sum")
      .bind(sum.slots)
      .bind(sum.weights)
      .bind_or(sum.shared_gate, output)
      .bind_or(sum.shared, output)
      .bind_or(sum.residual, output)
      .bind(output)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(items, threads)), NSUInteger(sum.rows)}, {NSUInteger(threads)});
  commands.encode();
}

WeightedSum stacked(const Tensor& slots, const Tensor& weights) {
  WeightedSum sum;
  sum.slots = slots.contiguous();
  sum.weights = weights.contiguous();
  sum.count = slots.size(-2);
  sum.width = slots.size(-1);
  sum.rows = 1;
  for (int64_t i = 0; i < slots.dim() - 2; ++i) sum.rows *= slots.size(i);
  return sum;
}

Tensor weighted_sum_stacked(const Tensor& slots, const Tensor& weights) {
  auto shape = slots.sizes().vec();
  shape.erase(shape.end() - 2);
  Tensor output = at::empty(shape, slots.options());
  if (output.numel() > 0) encode_weighted_sum(stacked(slots, weights), output);
  return output;
}

void weighted_sum_residual_stacked_(const Tensor& residual_, const Tensor& slots, const Tensor& weights) {
  if (residual_.numel() == 0) return;
  const Tensor residual = residual_.contiguous();
  WeightedSum sum = stacked(slots, weights);
  sum.residual = residual;
  encode_weighted_sum(sum, residual);
  if (!residual_.is_contiguous()) residual_.copy_(residual);
}

Tensor weighted_sum_residual_norm_stacked_(const Tensor& residual_, const Tensor& slots,
                                           const Tensor& weights, const Tensor& norm_weight, double eps) {
  Tensor output = at::empty(residual_.sizes(), residual_.options());
  if (output.numel() == 0) return output;
  const Tensor residual = residual_.contiguous();
  const Tensor norm = norm_weight.contiguous();
  const WeightedSum sum = stacked(slots, weights);
  WeightedSumNormParams params{};
  params.slots = sum.count;
  params.width = sum.width;
  params.vectorised = rows_start_aligned(sum.width, {residual, sum.slots, norm, output});
  params.weights_dtype = dtype_code(sum.weights);
  params.norm_dtype = dtype_code(norm);
  params.eps = static_cast<float>(eps);
  const RowLayout layout = row_per_threadgroup(sum.rows, sum.width, kSumNormThreads);
  Commands commands;
  commands.add({"combine", residual.scalar_type()}, "weighted_sum_norm")
      .bind(residual)
      .bind(sum.slots)
      .bind(sum.weights)
      .bind(norm)
      .bind(output)
      .params(params)
      .threadgroups(layout.grid, layout.threads);
  commands.encode();
  if (!residual_.is_contiguous()) residual_.copy_(residual);
  return output;
}

Tensor moe_weighted_reduce(const Tensor& weights, const Tensor& expert_out, const OptionalTensor& shared_gate,
                           const OptionalTensor& shared_out, const OptionalTensor& residual,
                           bool gate_is_logit) {
  WeightedSum sum;
  sum.slots = expert_out.contiguous();
  sum.weights = weights.contiguous();
  sum.shared_gate = contiguous(shared_gate);
  sum.shared = contiguous(shared_out);
  sum.residual = contiguous(residual);
  sum.gate_is_logit = gate_is_logit;
  sum.rows = weights.size(0);
  sum.count = weights.size(1);
  sum.width = expert_out.size(-1);
  Tensor output = at::empty({sum.rows, sum.width}, expert_out.options());
  if (output.numel() > 0) encode_weighted_sum(sum, output);
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<silu_mul_stacked>(m, "silu_mul_stacked");
  implement<weighted_sum_stacked>(m, "weighted_sum_stacked");
  implement<weighted_sum_residual_stacked_>(m, "weighted_sum_residual_stacked_");
  implement<weighted_sum_residual_norm_stacked_>(m, "weighted_sum_residual_norm_stacked_");
  implement<moe_weighted_reduce>(m, "moe_weighted_reduce");
}

}  // namespace moe_mps
