#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <string_view>
#include <tuple>

#include "formats.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr double kIssueCyclesOfWeight = 200;  // by the cost model

std::tuple<Tensor, Tensor, Tensor, Tensor> _quantize_by_importance(const Tensor& weight_,
                                                                   const Tensor& importance_,
                                                                   std::string_view to) {
  const WeightFormat& format = weight_format(to);
  const int64_t experts = weight_.size(0), rows = weight_.size(1), columns = weight_.size(2);
  const int64_t group = format.group_size;
  const auto options = weight_.options();
  Tensor packed = at::empty({experts, rows, columns * format.bits / 32}, options.dtype(at::kInt));
  Tensor scales = at::empty({experts, rows, columns / group}, options);
  Tensor zeros = at::empty(scales.sizes(), options);
  Tensor sums = at::empty({experts, rows, columns / group, 2}, options.dtype(at::kFloat));
  if (weight_.numel() == 0) return {packed, scales, zeros, sums};

  const Tensor weight = vector_rows(weight_), importance = vector_rows(importance_);
  QuantizeParams params{};
  params.expert_stride = weight.stride(0);
  params.row_stride = weight.stride(1);
  params.importance_stride = importance.stride(0);
  params.rows = rows;
  params.parts = columns / kQuantized;
  params.lanes = group / kQuantized;
  params.bits = format.bits;
  Commands commands;
  commands.add({"quantize", weight.scalar_type()}, "quantize_affine")
      .bind_strided(weight, importance)
      .bind(packed, scales, zeros, sums)
      .params(params)
      .work(kIssueCyclesOfWeight * static_cast<double>(weight.numel()), static_cast<double>(weight.nbytes()))
      .threadgroups({ceil_div(rows * params.parts, kQuantizeThreads), experts}, {kQuantizeThreads});
  commands.encode();
  return {packed, scales, zeros, sums};
}

}  // namespace

MOE_OPERATOR(_quantize_by_importance)

}  // namespace moe_mps
