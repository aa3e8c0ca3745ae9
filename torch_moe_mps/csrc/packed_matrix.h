// Makes the arguments of a quantised weight, of experts, linears or embeddings, a matrix of the kernels.
#pragma once
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "formats.h"
#include "matmul_run.h"

namespace moe_mps {

struct ScalesInFormat {
  const WeightFormat& format;
  const at::Tensor& scales;
};

// The dtype in which a call runs: that of `x`, or float32 if scales that should have it have another.
c10::ScalarType compute_dtype(c10::ScalarType x, std::initializer_list<ScalesInFormat> weights);

// The matrices `packed` ([E, rows, words], or [rows, words] for a single one) for a call in `dtype`. The
// kernels take scales in the dtype of the activations. For scales of another dtype, scales and activations
// are converted to float32, which is right but slow: every call reads the scales once more. `bias` is the
// layer's.
MatrixStack packed_matrix(const at::Tensor& packed, const at::Tensor& scales, const OptionalTensor& zeros,
                          const WeightFormat& format, const OptionalTensor& bias, c10::ScalarType dtype);

// The arguments of an operator that are one quantised matrix, or a stack of them.
struct Packed {
  const at::Tensor &packed, &scales;
  const OptionalTensor& zeros;
};
template <>
struct GroupOf<Packed>
    : MadeBy<aggregate<Packed, const at::Tensor&, const at::Tensor&, const OptionalTensor&>> {};

// The two matrices of a feed-forward network, and the dtype in which a call for activations of dtype `x`
// runs. The biases are the layer's.
std::pair<c10::ScalarType, FeedForward> feed_forward(c10::ScalarType x, const Packed& gate_up,
                                                     const Packed& down, std::string_view format,
                                                     std::optional<std::string_view> down_format,
                                                     const OptionalTensor& gate_up_bias = std::nullopt,
                                                     const OptionalTensor& down_bias = std::nullopt);

}  // namespace moe_mps
