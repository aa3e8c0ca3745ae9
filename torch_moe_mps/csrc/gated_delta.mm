#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "../shaders/params.h"
#include "norms.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor causal_conv1d_update_(const Tensor& x, const Tensor& conv_state_, const Tensor& weight_,
                             const OptionalTensor& bias_, std::string_view activation) {
  Tensor output = at::empty(x.sizes(), x.options());
  if (output.numel() == 0) return output;
  const Tensor state = conv_state_.contiguous();
  const Tensor weight = weight_.contiguous();
  const OptionalTensor bias = contiguous(bias_);
  ConvParams params{};
  params.x_batch_stride = x.stride(0);
  params.x_channel_stride = x.stride(1);
  params.x_token_stride = x.stride(2);
  params.rows = x.size(0) * x.size(1);
  params.channels = x.size(1);
  params.tokens = x.size(2);
  params.length = state.size(2);
  params.width = weight.size(1);
  params.silu = activation == "silu";
  params.state_dtype = dtype_code(state);
  params.weight_dtype = dtype_code(weight);
  params.has_bias = bias.has_value();
  params.bias_dtype = dtype_code(bias);

  Commands commands;
  commands.add({"gated_delta", x.scalar_type()}, "causal_conv1d_update")
      .bind_strided(x)
      .bind(state.numel() > 0 ? state : output)
      .bind(weight.numel() > 0 ? weight : output)
      .bind_or(bias, output)
      .bind(output)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(params.rows, kConvThreads))}, {NSUInteger(kConvThreads)});
  commands.encode();
  if (!conv_state_.is_contiguous()) conv_state_.copy_(state);
  return output;
}

Tensor gated_delta_rule_(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& g_,
                         const Tensor& beta_, const Tensor& state_, double scale,
                         std::optional<double> l2norm_eps, const OptionalTensor& a_log_,
                         const OptionalTensor& dt_bias_, bool beta_is_logit, const OptionalTensor& gate_,
                         const OptionalTensor& norm_weight, double norm_eps, double norm_offset) {
  Tensor output = at::empty(v_.sizes(), v_.options());
  if (output.numel() == 0) return output;
  const Tensor q = q_.contiguous(), k = k_.contiguous(), v = v_.contiguous();
  const Tensor g = g_.contiguous(), beta = beta_.contiguous(), state = state_.contiguous();
  const OptionalTensor a_log = contiguous(a_log_), dt_bias = contiguous(dt_bias_), gate = contiguous(gate_);
  const std::optional<InputNorm> norm = input_norm(norm_weight, norm_eps, norm_offset);
  DeltaParams params{};
  params.tokens = q.size(1);
  params.key_heads = q.size(2);
  params.heads = v.size(2);
  params.key_width = q.size(3);
  params.value_width = v.size(3);
  params.g_dtype = dtype_code(g);
  params.beta_dtype = dtype_code(beta);
  params.beta_is_logit = beta_is_logit;
  params.has_a_log = a_log.has_value();
  params.a_log_dtype = dtype_code(a_log);
  params.has_dt_bias = dt_bias.has_value();
  params.dt_bias_dtype = dtype_code(dt_bias);
  params.has_l2norm = l2norm_eps.has_value();
  params.l2norm_eps = static_cast<float>(l2norm_eps.value_or(0.0));
  params.scale = static_cast<float>(scale);
  params.has_norm = norm.has_value();
  if (norm) {
    params.norm_dtype = dtype_code(norm->weight);
    params.norm_eps = static_cast<float>(norm->eps);
    params.norm_offset = static_cast<float>(norm->offset);
  }

  const int64_t blocks = ceil_div(params.value_width, kSimdWidth);
  const int64_t of_block = ceil_div(params.key_width, kDeltaRows);  // simdgroups
  const int64_t at_once = norm ? std::min(blocks, kDeltaSimdgroups / of_block) : 1;
  Commands commands;
  commands.add({"gated_delta", q.scalar_type()}, "gated_delta_rule")
      .bind(q)
      .bind(k)
      .bind(v)
      .bind(g)
      .bind(beta)
      .bind_or(a_log, output)
      .bind_or(dt_bias, output)
      .bind(state)
      .bind(output)
      .bind_or(gate, output)
      .bind(norm ? norm->weight : output)
      .params(params)
      .threadgroups({NSUInteger(norm ? 1 : blocks), NSUInteger(q.size(0) * params.heads)},
                    {NSUInteger(at_once * of_block * kSimdWidth)});
  commands.encode();
  if (!state_.is_contiguous()) state_.copy_(state);
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<causal_conv1d_update_>(m, "causal_conv1d_update_");
  implement<gated_delta_rule_>(m, "gated_delta_rule_");
}

}  // namespace moe_mps
