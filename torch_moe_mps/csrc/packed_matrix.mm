#include "packed_matrix.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tensors.h"

namespace moe_mps {

using at::Tensor;

c10::ScalarType compute_dtype(c10::ScalarType x, std::initializer_list<ScalesInFormat> weights) {
  const bool same = std::all_of(weights.begin(), weights.end(), [&](const ScalesInFormat& each) {
    return !each.format.scales_like_activations || each.scales.scalar_type() == x;
  });
  return same ? x : at::kFloat;
}

MatrixStack packed_matrix(const Tensor& packed, const Tensor& scales, const OptionalTensor& zeros,
                          const WeightFormat& format, const OptionalTensor& bias, c10::ScalarType dtype) {
  if (!packed.is_contiguous() || !is_aligned(packed)) warn_of_copy(packed);
  MatrixStack matrix{quantized_library(format, dtype), aligned(packed)};
  const auto placed = [&](const Tensor& tensor) {
    return format.scales_like_activations ? in_dtype(tensor.contiguous(), dtype) : aligned(tensor);
  };
  matrix.scales = placed(scales);
  matrix.zeros = zeros.has_value() && zeros->defined() ? placed(*zeros) : matrix.scales;
  matrix.bias = contiguous(bias);
  matrix.experts = packed.dim() == 3 ? packed.size(0) : 1;
  matrix.rows = packed.size(-2);
  matrix.norms_inputs = format.norms_inputs();
  matrix.inputs = packed.size(-1) * 32 / format.bits;
  // Kernels count the words of a matrix, and the bits of scales that are bytes.
  check_counted("a packed matrix", matrix.rows * std::max(packed.size(-1), 8 * scales.size(-1)),
                packed.sizes());
  return matrix;
}

std::pair<c10::ScalarType, FeedForward> feed_forward(c10::ScalarType x, const Packed& gate_up,
                                                     const Packed& down, std::string_view format,
                                                     std::optional<std::string_view> down_format,
                                                     const OptionalTensor& gate_up_bias,
                                                     const OptionalTensor& down_bias) {
  const WeightFormat &first = weight_format(format), &second = weight_format(down_format.value_or(format));
  const auto dtype = compute_dtype(x, {{first, gate_up.scales}, {second, down.scales}});
  return {dtype,
          {packed_matrix(gate_up.packed, gate_up.scales, gate_up.zeros, first, gate_up_bias, dtype),
           packed_matrix(down.packed, down.scales, down.zeros, second, down_bias, dtype)}};
}

}  // namespace moe_mps
