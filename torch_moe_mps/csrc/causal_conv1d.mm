#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>

#include "../shaders/params.h"
#include "metal/work.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

Tensor causal_conv1d_update_(const Tensor& x, const Tensor& conv_state_, const Tensor& weight_,
                             const OptionalTensor& bias_, std::string_view activation, bool add_input,
                             const OptionalTensor& pending_, const OptionalTensor& counts_, bool keep) {
  Tensor output = at::empty(x.sizes(), x.options());
  if (output.numel() == 0 && (!pending_ || pending_->numel() == 0)) return output;
  const Tensor state = conv_state_.contiguous(), weight = weight_.contiguous();
  const OptionalTensor bias = contiguous(bias_);
  const OptionalTensor pending = contiguous(pending_), counts = contiguous(counts_);
  ConvParams params{};
  params.x = token_strides(x);
  params.tokens = x.size(1);
  params.channels = x.size(2);
  params.length = state.size(2);
  params.width = weight.size(1);
  // Only the first results read the state.
  params.thread_results = std::max<int64_t>(kConvTokens, params.width);
  params.silu = activation == "silu";
  params.add_input = add_input;
  params.state_dtype = dtype_code(state);
  params.weight_dtype = dtype_code(weight);
  params.has_bias = bias.has_value();
  params.bias_dtype = dtype_code(bias);
  params.pending = pending ? pending->size(2) : 0;
  params.keep = keep;
  // One thread reads all that are pending.
  if (pending) params.thread_results = std::max<uint32_t>(params.thread_results, output.size(1));
  const Tensor some = output.numel() > 0 ? output : *pending;  // in the place of what is empty

  Commands commands;
  commands.add({"causal_conv1d", x.scalar_type()}, "causal_conv1d_update", some)
      .bind_strided(x.numel() > 0 ? x : some)
      .bind(state.numel() > 0 ? state : some, params.width > 0 ? weight : some, bias, some)
      .bind(pending, counts)
      .params(params)
      .threadgroups({ceil_div(params.channels, kConvThreads),
                     std::max<int64_t>(1, ceil_div(output.size(1), params.thread_results)), x.size(0)},
                    {kConvThreads});
  commands.encode();
  if (!conv_state_.is_contiguous()) conv_state_.copy_(state);
  if (pending && !pending_->is_contiguous()) pending_->copy_(*pending);
  return output;
}

}  // namespace

MOE_OPERATOR(causal_conv1d_update_)

}  // namespace moe_mps
