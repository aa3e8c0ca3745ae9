#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <string_view>
#include <tuple>

#include "norms.h"

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

struct NormKernel {
  const char *file, *name;
};
constexpr NormKernel kRms = {"norms", "rms_norm"}, kGated = {"norms_gated", "rms_norm_gated"},
                     kNormAdd = {"norms_residual", "norm_add"},
                     kResidual = {"norms_residual", "residual_norm"}, kLayer = {"norms_layer", "layer_norm"},
                     kResidualLayer = {"norms_layer", "residual_layer_norm"};

// One dispatch for all operators. `residual`, `scalar` and `sum` are nullopt where the kernel has none.
void add_norm(Commands& commands, const NormKernel& kernel, const OptionalTensor& residual,
              const Tensor& input, const OptionalTensor& weight, const OptionalTensor& scalar, double eps,
              double weight_offset, const Tensor& output, const OptionalTensor& sum, Gating gating = {},
              double factor = 1.0) {
  const int64_t width = input.size(-1);
  const int64_t rows = output.numel() / width;
  const int64_t stride = row_stride(input).value();
  const RowLayout layout = row_layout(rows, width);
  NormParams params{};
  params.input_stride = stride;
  params.rows = rows;
  params.width = width;
  params.simdgroups_per_row = layout.simdgroups_per_row;
  params.vectorised = stride % 4 == 0 && rows_start_aligned(width, {input, output});
  for (const auto& other : {residual, weight, scalar, sum}) {
    if (other) params.vectorised &= rows_start_aligned(width, {*other});
  }
  params.has_weight = weight.has_value();
  params.weight_dtype = dtype_code(weight);
  if (scalar) {
    params.scalar_kind = scalar->numel() == width && width > 1 ? SCALAR_PER_COLUMN : SCALAR_SINGLE;
    params.scalar_dtype = dtype_code(*scalar);
  }
  params.write_sum = sum.has_value();
  params.groups = gating.groups;
  params.gate_is_sigmoid = gating.is_sigmoid;
  params.gate_first = gating.is_first;
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  params.factor = static_cast<float>(factor);

  commands.add({kernel.file, input.scalar_type()}, kernel.name, output)
      .bind(residual)
      .bind_strided(input)
      .bind(weight, scalar, output, sum)
      .params(params)
      .threadgroups(layout.grid, layout.threads);
}

template <class... Arguments>
void encode_norm(const Arguments&... arguments) {
  Commands commands;
  add_norm(commands, arguments...);
  commands.encode();
}

Tensor rms_norm(const Tensor& input, const OptionalTensor& weight, double eps, double weight_offset,
                double factor) {
  Tensor output = at::empty(input.sizes(), input.options());
  if (output.numel() == 0) return output;
  encode_norm(kRms, std::nullopt, row_stride(input) ? input : input.contiguous(), contiguous(weight),
              std::nullopt, eps, weight_offset, output, std::nullopt,
              Gating{.groups = weight ? weight->numel() / input.size(-1) : 1}, factor);
  return output;
}

Tensor layer_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  double weight_offset) {
  Tensor output = at::empty(input.sizes(), input.options());
  if (output.numel() == 0) return output;
  encode_norm(kLayer, std::nullopt, row_stride(input) ? input : input.contiguous(), contiguous(weight),
              contiguous(bias), eps, weight_offset, output, std::nullopt);
  return output;
}

Tensor rms_norm_gated(const Tensor& input, const Tensor& gate, const Tensor& weight, double eps,
                      double weight_offset, std::string_view activation, bool gate_first,
                      std::optional<int64_t> group) {
  Tensor output = at::empty(input.sizes(), input.options());
  if (output.numel() == 0) return output;
  const int64_t width = group.value_or(input.size(-1));
  const Tensor rows = input.unflatten(-1, {-1, width});
  Commands commands;
  add_gated_norm(commands, row_stride(rows) ? rows : rows.contiguous(), gate,
                 {weight.contiguous(), eps, weight_offset},
                 {input.size(-1) / width, activation == "sigmoid", gate_first}, output);
  commands.encode();
  return output;
}

// The norms with a residual: their results, and `sum` where the kernel writes one.
Tensor with_residual(const NormKernel& kernel, const Tensor& residual, const Tensor& input,
                     const OptionalTensor& weight, const OptionalTensor& scalar, double eps,
                     double weight_offset, const OptionalTensor& sum = std::nullopt, double factor = 1.0) {
  Tensor output = at::empty(residual.sizes(), residual.options());
  if (output.numel() == 0) return output;
  encode_norm(kernel, residual.contiguous(), input.contiguous(), contiguous(weight), contiguous(scalar), eps,
              weight_offset, output, sum, Gating{}, factor);
  return output;
}

Tensor fused_norm_add(const Tensor& residual, const Tensor& input, const Tensor& weight, double eps,
                      double weight_offset) {
  return with_residual(kNormAdd, residual, input, weight, std::nullopt, eps, weight_offset);
}

Tensor fused_norm_add_scalar(const Tensor& residual, const Tensor& input, const Tensor& weight,
                             const Tensor& scalar, double eps, double weight_offset) {
  return with_residual(kNormAdd, residual, input, weight, scalar, eps, weight_offset);
}

std::tuple<Tensor, Tensor> fused_residual_norm(const Tensor& residual, const Tensor& input,
                                               const Tensor& weight, double eps, double weight_offset,
                                               double factor) {
  const Tensor sum = at::empty(residual.sizes(), residual.options());
  const Tensor output =
      with_residual(kResidual, residual, input, weight, std::nullopt, eps, weight_offset, sum, factor);
  return {output, sum};
}

std::tuple<Tensor, Tensor> fused_residual_layer_norm(const Tensor& residual, const Tensor& input,
                                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                                     double eps, double weight_offset) {
  const Tensor sum = at::empty(residual.sizes(), residual.options());
  const Tensor output = with_residual(kResidualLayer, residual, input, weight, bias, eps, weight_offset, sum);
  return {output, sum};
}

Tensor fused_residual_norm_scalar(const Tensor& residual, const Tensor& input, const Tensor& weight,
                                  const Tensor& scalar, double eps, double weight_offset) {
  return with_residual(kResidual, residual, input, weight, scalar, eps, weight_offset);
}

}  // namespace

std::optional<InputNorm> input_norm(const OptionalTensor& weight, double eps, double offset) {
  if (!weight || weight->numel() == 0) return std::nullopt;  // a row without elements has no mean
  return InputNorm{weight->contiguous(), eps, offset};
}

const Tensor& add_norm(Commands& commands, const Tensor& x, const InputNorm& norm) {
  const Tensor& output = commands.keep(at::empty_like(x));
  add_norm(commands, kRms, std::nullopt, x, norm.weight, std::nullopt, norm.eps, norm.offset, output,
           std::nullopt);
  return output;
}

void add_gated_norm(Commands& commands, const Tensor& x, const Tensor& gate, const InputNorm& norm,
                    Gating gating, const Tensor& output) {
  add_norm(commands, kGated, commands.keep(gate.contiguous()), commands.keep(x), commands.keep(norm.weight),
           std::nullopt, norm.eps, norm.offset, output, std::nullopt, gating);
}

MOE_OPERATOR(rms_norm)
MOE_OPERATOR(layer_norm)
MOE_OPERATOR(rms_norm_gated)
MOE_OPERATOR(fused_norm_add)
MOE_OPERATOR(fused_norm_add_scalar)
MOE_OPERATOR(fused_residual_norm)
MOE_OPERATOR(fused_residual_layer_norm)
MOE_OPERATOR(fused_residual_norm_scalar)

}  // namespace moe_mps
