#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// Output that a block adds to the streams, readable for kernels.
struct Update {
  Tensor streams;
  OptionalTensor out, post, comb;
};

Update update_of(const Tensor& streams, const OptionalTensor& out, const OptionalTensor& post,
                 const OptionalTensor& comb) {
  return {aligned(streams), out ? OptionalTensor(aligned(*out)) : out, contiguous(post), contiguous(comb)};
}

HyperParams params_of(const Update& update) {
  HyperParams params{};
  params.width = update.streams.size(-1);
  params.streams = update.streams.size(-2);
  params.tokens = update.streams.numel() / (int64_t(params.width) * params.streams);
  params.has_out = update.out.has_value();
  params.has_comb = update.comb.has_value();
  return params;
}

Command& add_update(Commands& commands, const char* kernel, const Update& update, const Tensor& updated) {
  return commands.add({"hyper_connection", update.streams.scalar_type()}, kernel, update.streams)
      .bind(update.streams, update.out, update.post, update.comb, updated);
}

int64_t mixing_groups(const HyperParams& params) {
  return ceil_div(params.width, 4 * kHyperThreads);
}

Tensor _hyper_update(const Tensor& streams, const Tensor& out, const Tensor& post,
                     const OptionalTensor& comb) {
  const Tensor updated = at::empty(streams.sizes(), streams.options());
  if (updated.numel() == 0) return updated;
  const Update update = update_of(streams, out, post, comb);
  const HyperParams params = params_of(update);
  Commands commands;
  add_update(commands, "hyper_update", update, updated)
      .params(params)
      .threadgroups({mixing_groups(params), params.tokens}, {kHyperThreads});
  commands.encode();
  return updated;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> _hyper_connection(
    const Tensor& streams, const Tensor& fn_, const Tensor& base_, const Tensor& scale_,
    const OptionalTensor& out, const OptionalTensor& post, const OptionalTensor& comb, double norm_eps,
    double eps, int64_t iterations, double post_factor, double post_eps) {
  const int64_t count = streams.size(-2), width = streams.size(-1), rows = fn_.size(0);
  const auto floats = streams.options().dtype(at::kFloat);
  at::DimVector leading(streams.sizes().slice(0, streams.dim() - 2));
  const auto shaped = [&](at::IntArrayRef last, bool is_there) {
    at::DimVector shape = is_there ? leading : at::DimVector{0};
    if (is_there) shape.append(last.begin(), last.end());
    return shape;
  };
  const Tensor x = at::empty(shaped({width}, true), streams.options());
  const Tensor next_post = at::empty(shaped({count}, rows > count), floats);
  const Tensor next_comb = at::empty(shaped({count, count}, rows > 2 * count), floats);
  const Tensor updated = at::empty(shaped({count, width}, out.has_value()), streams.options());
  const auto results = std::make_tuple(x, next_post, next_comb, updated);
  if (streams.numel() == 0) return results;

  const Update update = update_of(streams, out, post, comb);
  const Tensor fn = aligned(fn_), base = base_.contiguous(), scale = scale_.contiguous();
  HyperParams params = params_of(update);
  params.rows = rows;
  params.slices = ceil_div(width, kHyperColumns);
  params.fn_dtype = dtype_code(fn);
  params.base_dtype = dtype_code(base);
  params.scale_dtype = dtype_code(scale);
  params.iterations = iterations;
  params.norm_eps = static_cast<float>(norm_eps);
  params.eps = static_cast<float>(eps);
  params.post_factor = static_cast<float>(post_factor);
  params.post_eps = static_cast<float>(post_eps);
  const Tensor partials = at::empty({int64_t(params.tokens), rows + 1, int64_t(params.slices)}, floats);

  const bool few = params.tokens == 1;
  const int64_t tiles = ceil_div(params.tokens, few ? 1 : kHyperTokens);
  Commands commands;
  add_update(commands, few ? "hyper_products" : "hyper_products_of_tokens", update,
             out ? updated : update.streams)
      .bind(fn, partials)
      .params(params)
      .threadgroups({params.slices, tiles}, {kHyperThreads});
  commands.add({"hyper_connection", streams.scalar_type()}, "hyper_mix")
      .bind(out ? updated : update.streams, partials, base, scale, x, rows > count ? next_post : partials,
            rows > 2 * count ? next_comb : partials)
      .params(params)
      .threadgroups({mixing_groups(params), params.tokens}, {kHyperThreads});
  commands.encode();
  return results;
}

}  // namespace

MOE_OPERATOR(_hyper_update)
MOE_OPERATOR(_hyper_connection)

}  // namespace moe_mps
