#include "packed_matrix.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tensors.h"

namespace moe_mps {

using at::Tensor;

c10::ScalarType compute_dtype(c10::ScalarType x, std::initializer_list<Tensor> scales) {
  const bool same = std::all_of(scales.begin(), scales.end(), [&](const Tensor& each) {
    return each.scalar_type() == at::kByte || each.scalar_type() == x;
  });
  return same ? x : at::kFloat;
}

MatrixStack packed_matrix(const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& biases,
                          const WeightFormat& format, const std::optional<Tensor>& bias,
                          c10::ScalarType dtype) {
  if (!packed.is_contiguous() || !is_aligned(packed)) warn_of_copy(packed);
  MatrixStack matrix{quantized_library(format, dtype), aligned(packed)};
  matrix.scales = scales.contiguous();
  if (matrix.scales.scalar_type() != at::kByte) matrix.scales = in_dtype(matrix.scales, dtype);
  matrix.biases = matrix.scales;
  if (biases.has_value() && biases->defined()) matrix.biases = in_dtype(biases->contiguous(), dtype);
  matrix.bias = contiguous(bias);
  matrix.experts = packed.dim() == 3 ? packed.size(0) : 1;
  matrix.rows = packed.size(-2);
  matrix.norms_inputs = format.norms_inputs();
  matrix.inputs = packed.size(-1) * 32 / format.bits;
  return matrix;
}

std::optional<Tensor> converted(const std::optional<Tensor>& tensor, c10::ScalarType dtype) {
  const std::optional<Tensor> rows = contiguous(tensor);
  return rows ? std::optional(in_dtype(*rows, dtype)) : rows;
}

}  // namespace moe_mps
