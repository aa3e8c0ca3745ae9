#include "combine.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <tuple>

#include "matmul_run.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

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
      .bind(gate, up, output)
      .params(params)
      .threadgroups({ceil_div(output.numel(), per_group)}, {kSiluThreads});
  commands.encode();
  return output;
}

void launch_sum(Command& command, const WeightedSumParams& params, const Tensor& output) {
  const int64_t items = ceil_div(params.width, params.vectorised ? 4 : 1);
  const int64_t most = output.numel() <= kFewColumns ? kSumThreadsFew : kSumThreads;
  const int64_t threads = std::min(most, ceil_div(items, kSimdWidth) * kSimdWidth);
  command.threadgroups({ceil_div(items, threads), output.numel() / params.width}, {threads});
}

// output [rows, width] = the sum over expert_out [rows, count, width], which are contiguous.
void encode_weighted_sum(const Tensor& expert_out, const ExpertSum& sum, const Tensor& output) {
  const int64_t width = output.size(-1);
  WeightedSumParams params{};
  params.sum = sum_params(sum);
  params.has_weights = 1;
  params.slots = sum.weights.size(-1);
  params.width = width;
  params.vectorised = rows_start_aligned(
      width, {expert_out, output, sum.shared_out.value_or(output), sum.residual.value_or(output)});
  // A buffer that is written is bound once: the compiler may take two for two.
  ExpertSum bound = sum;
  params.in_place = sum.residual.has_value() && sum.residual->is_same(output);
  if (params.in_place) bound.residual.reset();
  Commands commands;
  Command& command = commands.add({"combine", output.scalar_type()}, "weighted_sum").bind(expert_out);
  launch_sum(bind_sum(command, bound, expert_out).bind(output).params(params), params, output);
  commands.encode();
}

// The params of the activation, and its launch for rows of `width` numbers.
void launch_activation(Command& command, const Tensor& rows, int64_t width, const Activation& activation) {
  MatmulParams params{};
  params.rows = rows.size(-1);
  params.outputs = width;
  params.row_layout = activation.row_layout;
  params.activation = activation.kind;
  params.alpha = activation.alpha;
  params.limit = activation.limit;
  command.params(params).threadgroups({rows.numel() / rows.size(-1), ceil_div(width, kActivationThreads)},
                                      {kActivationThreads});
}

Tensor expert_activation(const Tensor& rows_, const Activation& activation) {
  const Tensor rows = rows_.contiguous();
  auto shape = rows.sizes().vec();
  if (activation.row_layout != ROWS_PLAIN) shape.back() /= 2;
  const Tensor out = at::empty(shape, rows.options());
  if (out.numel() == 0) return out;
  Commands commands;
  Command& command = commands.add({"combine", rows.scalar_type()}, "expert_activation").bind(rows, out);
  launch_activation(command, rows, shape.back(), activation);
  commands.encode();
  return out;
}

Tensor _expert_activation_backward(const Tensor& dy_, const Tensor& rows_, const Activation& activation) {
  const Tensor dy = dy_.contiguous(), rows = rows_.contiguous();
  const Tensor out = at::empty(rows.sizes(), rows.options());
  if (out.numel() == 0) return out;
  Commands commands;
  Command& command =
      commands.add({"combine", rows.scalar_type()}, "expert_activation_backward").bind(dy, rows, out);
  launch_activation(command, rows, dy.size(-1), activation);
  commands.encode();
  return out;
}

std::tuple<Tensor, Tensor> _moe_weighted_reduce_backward(const Tensor& dy_, const Tensor& expert_out_,
                                                         const Tensor& weights_) {
  const Tensor dy = dy_.contiguous(), weights = weights_.contiguous(), expert_out = expert_out_.contiguous();
  Tensor of_weights = at::empty(weights.sizes(), weights.options().dtype(at::kFloat));
  Tensor of_expert_out = at::empty(expert_out.sizes(), expert_out.options());
  if (of_expert_out.numel() == 0) return {of_expert_out, of_weights.zero_()};
  WeightedSumBackwardParams params{};
  params.pairs = weights.numel();
  params.slots = weights.size(-1);
  params.width = dy.size(-1);
  params.vectorised = rows_start_aligned(params.width, {dy, expert_out, of_expert_out});
  params.weights_dtype = dtype_code(weights);
  Commands commands;
  commands.add({"combine", dy.scalar_type()}, "weighted_sum_backward")
      .bind(dy, weights, expert_out, of_weights, of_expert_out)
      .params(params)
      .threadgroups({ceil_div(params.pairs, kSumThreads / kSimdWidth)}, {kSumThreads});
  commands.encode();
  return {of_expert_out, of_weights};
}

Tensor weighted_sum_stacked(const Tensor& expert_out, const Tensor& weights) {
  auto shape = expert_out.sizes().vec();
  shape.erase(shape.end() - 2);
  Tensor output = at::empty(shape, expert_out.options());
  if (output.numel() > 0) encode_weighted_sum(expert_out.contiguous(), {weights.contiguous()}, output);
  return output;
}

void weighted_sum_residual_stacked_(const Tensor& residual_, const Tensor& expert_out,
                                    const Tensor& weights) {
  if (residual_.numel() == 0) return;
  const Tensor residual = residual_.contiguous();
  ExpertSum sum{weights.contiguous()};
  sum.residual = residual;
  encode_weighted_sum(expert_out.contiguous(), sum, residual);
  if (!residual_.is_contiguous()) residual_.copy_(residual);
}

Tensor weighted_sum_residual_norm_stacked_(const Tensor& residual_, const Tensor& expert_out_,
                                           const Tensor& weights_, const Tensor& norm_weight, double eps) {
  Tensor output = at::empty(residual_.sizes(), residual_.options());
  if (output.numel() == 0) return output;
  const Tensor residual = residual_.contiguous(), expert_out = expert_out_.contiguous();
  const Tensor weights = weights_.contiguous(), norm = norm_weight.contiguous();
  const int64_t width = output.size(-1), rows = output.numel() / width;
  WeightedSumNormParams params{};
  params.slots = weights.size(-1);
  params.width = width;
  params.vectorised = rows_start_aligned(width, {residual, expert_out, norm, output});
  params.weights_dtype = dtype_code(weights);
  params.norm_dtype = dtype_code(norm);
  params.eps = static_cast<float>(eps);
  const RowLayout layout = row_per_threadgroup(rows, width, kSumNormThreads);
  Commands commands;
  commands.add({"combine", residual.scalar_type()}, "weighted_sum_norm")
      .bind(residual, expert_out, weights, norm, output)
      .params(params)
      .threadgroups(layout.grid, layout.threads);
  commands.encode();
  if (!residual_.is_contiguous()) residual_.copy_(residual);
  return output;
}

Tensor moe_weighted_reduce(const Tensor& expert_out, const Tensor& weights, const Summands& around) {
  const ExpertSum sum = around.with(weights.contiguous(), expert_out.scalar_type());
  auto shape = weights.sizes().vec();
  shape.back() = expert_out.size(-1);
  Tensor output = at::empty(shape, expert_out.options());
  if (output.numel() > 0) encode_weighted_sum(expert_out.contiguous(), sum, output);
  return output;
}

}  // namespace

ExpertSum Summands::with(const Tensor& weights, c10::ScalarType dtype) const {
  return {weights, contiguous(shared_gate), converted(shared_out, dtype), converted(residual, dtype),
          gate_is_logit};
}

ExpertSumParams sum_params(const ExpertSum& sum) {
  ExpertSumParams params{};
  params.weights_dtype = dtype_code(sum.weights);
  params.has_gate = sum.shared_gate.has_value();
  params.gate_dtype = dtype_code(sum.shared_gate);
  params.gate_is_logit = sum.gate_is_logit;
  params.has_shared = sum.shared_out.has_value();
  params.has_residual = sum.residual.has_value();
  return params;
}

Command& bind_sum(Command& command, const ExpertSum& sum, const Tensor& stand_in) {
  return command.stand_in(stand_in).bind(sum.weights, sum.shared_gate, sum.shared_out, sum.residual);
}

void add_expert_sum(Commands& commands, const Tensor& expert_out, const Tensor& output) {
  WeightedSumParams params{};
  params.slots = expert_out.size(-2);
  params.width = output.size(-1);
  params.vectorised = rows_start_aligned(params.width, {expert_out, output});
  Command& command = commands.add({"combine", output.scalar_type()}, "weighted_sum");
  command.bind(expert_out, expert_out, expert_out, expert_out, expert_out, output).params(params);
  launch_sum(command, params, output);
}

MOE_OPERATOR(expert_activation)
MOE_OPERATOR(_expert_activation_backward)
MOE_OPERATOR(_moe_weighted_reduce_backward)
MOE_OPERATOR(silu_mul_stacked)
MOE_OPERATOR(weighted_sum_stacked)
MOE_OPERATOR(weighted_sum_residual_stacked_)
MOE_OPERATOR(weighted_sum_residual_norm_stacked_)
MOE_OPERATOR(moe_weighted_reduce)

}  // namespace moe_mps
