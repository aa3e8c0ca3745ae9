#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../shaders/params.h"
#include "metal/work.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

Tensor selective_scan_(const Tensor& x, const Tensor& step, const Tensor& b, const Tensor& c,
                       const Tensor& state, const Tensor& a_log_, const OptionalTensor& dt_bias_,
                       const OptionalTensor& skip_, const OptionalTensor& gate,
                       const OptionalTensor& pending_, const OptionalTensor& counts_, bool keep) {
  const Tensor output = at::empty(x.sizes(), x.options());
  if (output.numel() == 0 && (!pending_ || pending_->numel() == 0 || state.numel() == 0)) return output;
  const Tensor a_log = a_log_.contiguous();
  const OptionalTensor dt_bias = contiguous(dt_bias_), skip = contiguous(skip_);
  const OptionalTensor pending = contiguous(pending_), counts = contiguous(counts_);
  SelectiveScanParams params{};
  params.x = token_strides(x);
  params.step = token_strides(step);
  params.gate = token_strides(gate.value_or(x));
  params.b = token_strides(b);
  params.c = token_strides(c);
  params.state = token_strides(state);
  params.tokens = x.size(1);
  params.channels = x.size(2);
  params.states = b.size(2);
  params.a_log_dtype = dtype_code(a_log);
  params.has_dt_bias = dt_bias.has_value();
  params.dt_bias_dtype = dtype_code(dt_bias);
  params.has_skip = skip.has_value();
  params.skip_dtype = dtype_code(skip);
  params.has_gate = gate.has_value();
  params.pending = pending ? pending->size(2) : 0;
  params.keep = keep;

  const bool has_tokens = output.numel() > 0;
  const Tensor some = has_tokens ? output : *pending;  // in the place of what is empty
  Commands commands;
  commands.add({"selective_scan", x.scalar_type()}, "selective_scan", some)
      .bind_strided(has_tokens ? x : some, has_tokens ? step : some, has_tokens ? b : some,
                    has_tokens ? c : some)
      .bind(a_log, dt_bias, skip)
      .bind_strided(!has_tokens ? some
                    : gate      ? *gate
                                : x,
                    state)
      .bind(some, pending, counts)
      .params(params)
      .threadgroups({ceil_div(params.channels, kSelectiveThreads), x.size(0)}, {kSelectiveThreads});
  commands.encode();
  if (pending && !pending_->is_contiguous()) pending_->copy_(*pending);
  return output;
}

}  // namespace

MOE_OPERATOR(selective_scan_)

}  // namespace moe_mps
