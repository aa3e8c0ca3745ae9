#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>

#include "combine.h"
#include "metal/work.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// Few tiles share the columns among so many threadgroups. Untuned.
constexpr int64_t kFewTiles = 64;

// B where rows or columns lie one after another: an expert reads only its own columns of the latter.
Tensor dense(const Tensor& b) {
  return b.t().is_contiguous() ? b : b.contiguous();
}

LoraParams lora_params(const Tensor& a, const Tensor& b, int64_t pairs, int64_t experts, double scaling) {
  LoraParams params{};
  params.pairs = pairs;
  params.slots = 1;
  params.experts = experts;
  params.rank = a.size(0) / experts;
  params.inputs = a.size(1);
  params.outputs = b.size(0);
  params.tile_pairs = kLoraPairs;
  params.x_per_pair = 1;
  params.factor_dtype = dtype_code(a);
  params.b_row = b.stride(0);
  params.b_column = b.stride(1);
  params.scaling = static_cast<float>(scaling);
  return params;
}

void set_ids(LoraParams& params, const Tensor& x, const Tensor& ids, const OptionalTensor& pair_order) {
  params.slots = ids.size(-1);
  params.has_ids = 1;
  params.wide_ids = ids.scalar_type() == at::kLong;
  params.x_per_pair = x.dim() > ids.dim();
  params.listed = pair_order.has_value();
  if (!params.listed) params.tile_pairs = 1;
}

// Launches a kernel over tiles of pairs, and columns of a matrix with `width` of them; inner products of
// `sides` products are in threadgroup memory.
void launch_tiles(Command& command, LoraParams params, int64_t width, int64_t sides) {
  const int64_t tiles = ceil_div(params.pairs, params.tile_pairs);
  const int64_t most = ceil_div(width, kLoraThreads);
  const int64_t per_block = ceil_div(most, std::clamp<int64_t>(kFewTiles / tiles, 1, most));
  params.columns = per_block * kLoraThreads;
  const double products = static_cast<double>(params.pairs) * static_cast<double>(params.rank) *
                          static_cast<double>(params.inputs + params.outputs);
  command.work(kIssueCyclesOfProduct * products, products)
      .params(params)
      .threadgroup_memory(sides * kLoraPairs * params.rank * sizeof(float))
      .threadgroups({ceil_div(most, per_block), tiles}, {kLoraThreads});
}

// added + scaling * b (a x), with the params' pairs. All are contiguous.
Tensor with_adapter(const Tensor& added, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& ids,
                    const OptionalTensor& pair_order, const LoraParams& params) {
  const Tensor out = at::empty(added.sizes(), added.options());
  if (out.numel() == 0) return out;
  Commands commands;
  Command& command = commands.add({"lora", added.scalar_type()}, "lora", ids);
  // Metal binds no empty buffer; without inputs the kernel reads none.
  command.bind(added, x.numel() > 0 ? x : added, a.numel() > 0 ? a : added)
      .bind_strided(b)
      .bind(ids, pair_order, out);
  launch_tiles(command, params, params.outputs, 1);
  commands.encode();
  return out;
}

Tensor linear_lora(const Tensor& added_, const Tensor& x_, const Tensor& a_, const Tensor& b_,
                   double scaling) {
  const Tensor added = added_.contiguous(), x = x_.contiguous(), a = a_.contiguous(), b = dense(b_);
  const int64_t pairs = b.size(0) > 0 ? added.numel() / b.size(0) : 0;
  return with_adapter(added, x, a, b, added, std::nullopt, lora_params(a, b, pairs, 1, scaling));
}

Tensor expert_lora(const Tensor& added_, const Tensor& x_, const Tensor& ids_, const Tensor& a_,
                   const Tensor& b_, int64_t experts, const OptionalTensor& pair_order_,
                   const OptionalTensor& offsets, double scaling) {
  const Tensor added = added_.contiguous(), x = x_.contiguous(), a = a_.contiguous(), b = dense(b_);
  const Tensor ids = ids_.contiguous();
  const OptionalTensor pair_order = contiguous(pair_order_);
  LoraParams params = lora_params(a, b, ids.numel(), experts, scaling);
  set_ids(params, x, ids, pair_order);
  return with_adapter(added, x, a, b, ids, pair_order, params);
}

std::tuple<Tensor, Tensor, Tensor> _expert_lora_backward(const Tensor& dy_, const Tensor& x_,
                                                         const Tensor& ids_, const Tensor& a_,
                                                         const Tensor& b_, const Tensor& pair_order_,
                                                         const Tensor& offsets_, int64_t experts,
                                                         double scaling) {
  const Tensor dy = dy_.contiguous(), x = x_.contiguous(), a = a_.contiguous(), b = dense(b_);
  const Tensor ids = ids_.contiguous(), offsets = offsets_.contiguous();
  const OptionalTensor pair_order = pair_order_.contiguous();
  LoraParams params = lora_params(a, b, ids.numel(), experts, scaling);
  set_ids(params, x, ids, pair_order);
  if (dy.numel() == 0 || x.numel() == 0) {
    return {at::zeros(x.sizes(), x.options()), at::zeros(a.sizes(), a.options()),
            at::zeros({b.size(1), b.size(0)}, b.options())};
  }
  const Tensor dx = at::empty(x.sizes(), x.options()), da = at::empty(a.sizes(), a.options());
  const Tensor db = at::empty({b.size(1), b.size(0)}, b.options());  // column after column
  const bool sums = params.x_per_pair == 0;
  const Tensor of_pairs =
      sums ? at::empty({params.pairs / params.slots, params.slots, params.inputs}, x.options()) : dx;
  const auto inner = a.options().dtype(at::kFloat);
  const Tensor gradients = at::empty({params.pairs, params.rank}, inner);
  const Tensor products = at::empty({params.pairs, params.rank}, inner);
  Commands commands;
  const Library library{"lora", dy.scalar_type()};
  Command& command = commands.add(library, "lora_backward");
  command.bind(dy, x, a).bind_strided(b).bind(ids, pair_order, of_pairs, gradients, products);
  launch_tiles(command, params, params.inputs, 2);
  if (sums) add_expert_sum(commands, of_pairs, dx);
  commands.add(library, "lora_outer")
      .bind(dy, x, gradients, products, pair_order, offsets, da, db)
      .params(params)
      .threadgroups({ceil_div(params.inputs, kLoraThreads) + ceil_div(params.outputs, kLoraThreads), experts},
                    {kLoraThreads});
  commands.encode();
  return {dx, da, db};
}

}  // namespace

MOE_OPERATOR(linear_lora)
MOE_OPERATOR(expert_lora)
MOE_OPERATOR(_expert_lora_backward)

}  // namespace moe_mps
