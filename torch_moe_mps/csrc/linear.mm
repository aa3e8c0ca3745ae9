#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "packed_matrix.h"
#include "register.h"
#include "tensors.h"
#include "transposed.h"

namespace moe_mps {
namespace {

using at::Tensor;

// Contiguous, aligned, in `dtype`.
Tensor rows_of(const Tensor& x, c10::ScalarType dtype) {
  return aligned(in_dtype(x, dtype));
}

Tensor linear_quantized(const Tensor& x, const Tensor& packed, const Tensor& scales,
                        const OptionalTensor& zeros, std::string_view format, const OptionalTensor& bias,
                        const OptionalTensor& residual, const OptionalTensor& order,
                        const std::optional<InputNorm>& norm, std::optional<std::string_view> activation,
                        std::optional<int64_t> activated, double factor,
                        std::optional<std::string_view> dtype_name) {
  const c10::ScalarType wanted = dtype_name ? dtype_named(*dtype_name) : x.scalar_type();
  at::DimVector shape(x.sizes());
  shape.back() = packed.size(0);
  if (x.numel() == 0 || packed.numel() == 0) {  // no rows, no outputs, or outputs of nothing
    Tensor out = residual.has_value() ? residual->to(wanted, false, true, at::MemoryFormat::Contiguous)
                                      : at::zeros(shape, x.options().dtype(wanted));
    if (!bias.has_value() || out.numel() == 0) return out;
    return out.add_(order ? at::empty_like(*bias).index_copy_(0, order->to(at::kLong), *bias) : *bias);
  }
  const auto dtype = compute_dtype(x.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix = packed_matrix(packed, scales, zeros, weight_format(format), bias, dtype);
  const Tensor rows = rows_of(x, dtype);
  const Tensor out = at::empty(shape, rows.options().dtype(dtype_name ? wanted : dtype));
  const OptionalTensor added = converted(residual, dtype), columns = contiguous(order);
  Commands commands;
  Activation of_outputs;
  if (activation) of_outputs = activation_of(*activation, std::nullopt, std::nullopt, false, false);
  of_outputs.activated = activated.value_or(0);
  of_outputs.factor = static_cast<float>(factor);
  add_linear(commands, rows, norm, matrix, of_outputs, added, columns, out);
  commands.encode();
  return in_dtype(out, wanted);
}

Tensor _linear_quantized_transposed(const Tensor& dy, const Tensor& packed, const Tensor& scales,
                                    const OptionalTensor& zeros, std::string_view format) {
  const auto dtype = compute_dtype(dy.scalar_type(), {{weight_format(format), scales}});
  const MatrixStack matrix = packed_matrix(packed, scales, zeros, weight_format(format), std::nullopt, dtype);
  return in_dtype(transposed_product(in_dtype(dy, dtype), matrix, std::nullopt), dy.scalar_type());
}

Tensor _mlp_quantized(const Tensor& x, const Packed& gate_up, const Packed& down, std::string_view format,
                      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                      const Activation& activation, const OptionalTensor& residual,
                      std::optional<std::string_view> down_format, const std::optional<InputNorm>& norm) {
  if (x.numel() == 0) return at::empty(x.sizes(), x.options());
  if (gate_up.packed.numel() == 0) {  // nothing between the matrices
    Tensor out = residual.has_value() ? residual->clone(at::MemoryFormat::Contiguous)
                                      : at::zeros(x.sizes(), x.options());
    return down_bias.has_value() ? out.add_(*down_bias) : out;
  }
  const auto [dtype, matrices] =
      feed_forward(x.scalar_type(), gate_up, down, format, down_format, gate_up_bias, down_bias);
  const Tensor out = apply_mlp(rows_of(x, dtype), norm, matrices, activation, converted(residual, dtype));
  return in_dtype(out, x.scalar_type());
}

Tensor mlp_quantized(const Tensor& x, const Packed& gate_up, const Packed& down, std::string_view format,
                     const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                     const Activation& activation, std::optional<std::string_view> down_format) {
  return _mlp_quantized(x, gate_up, down, format, gate_up_bias, down_bias, activation, std::nullopt,
                        down_format, std::nullopt);
}

Tensor embedding_quantized(const Tensor& ids_, const Tensor& packed, const Tensor& scales,
                           const OptionalTensor& zeros, std::string_view format,
                           std::string_view dtype_name) {
  const c10::ScalarType dtype = dtype_named(dtype_name);
  const auto scale_dtype = weight_format(format).scales_like_activations ? scales.scalar_type() : dtype;
  const MatrixStack matrix =
      packed_matrix(packed, scales, zeros, weight_format(format), std::nullopt, scale_dtype);
  std::vector<int64_t> shape = ids_.sizes().vec();
  shape.push_back(matrix.inputs);
  const auto options = ids_.options().dtype(dtype);
  if (packed.numel() == 0) return at::zeros(shape, options);
  Tensor out = at::empty(shape, options);
  if (out.numel() == 0) return out;
  const Tensor ids = ids_.contiguous();
  EmbeddingParams params{};
  params.matrix.pairs = ids.numel();
  params.matrix.experts = params.matrix.rows = matrix.rows;
  params.matrix.inputs = matrix.inputs;
  params.matrix.has_ids = 1;
  params.matrix.wide_ids = ids.scalar_type() == at::kLong;
  params.out_dtype = dtype_code(out);
  Commands commands;
  commands.add(matrix.library, "embedding_rows")
      .bind(matrix.packed, matrix.scales, matrix.zeros, ids, out)
      .work(0, static_cast<double>(out.nbytes()))
      .params(params)
      .threadgroups({ids.numel()}, {kEmbeddingThreads});
  commands.encode();
  return out;
}

}  // namespace

MOE_OPERATOR(linear_quantized)
MOE_OPERATOR(_linear_quantized_transposed)
MOE_OPERATOR(_mlp_quantized)
MOE_OPERATOR(mlp_quantized)
MOE_OPERATOR(embedding_quantized)

}  // namespace moe_mps
