#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "metal/work.h"
#include "packed_matrix.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr int64_t kMostStride = kMostElements / 4;  // kernels count from a token to the next
constexpr int64_t kPack = 8;                        // elements that a kernel loads at once

// [B, T, Hq, width] whose heads start at multiples of a pack, in ascending order of tokens.
Tensor readable(const Tensor& x) {
  const bool ascending = x.size(0) == 1 || x.stride(0) >= (x.size(1) - 1) * x.stride(1);
  const bool near = x.stride(1) < kMostStride && (x.size(0) == 1 || x.stride(0) < kMostStride);
  const bool whole = x.size(3) == 1 || x.stride(3) == 1;
  return ascending && near && whole && starts_aligned(x, kPack) ? x : x.clone(at::MemoryFormat::Contiguous);
}

// Rows of a stack [Hq, rows, columns] that follow each other, from a head to the next; 0 if it has to be
// copied.
int64_t rows_between_heads(const Tensor& stack) {
  if (stack.numel() == 0) return 1;
  const int64_t columns = stack.size(2),
                between = stack.size(0) == 1 ? stack.size(1) : stack.stride(0) / columns;
  const bool rows_follow = stack.stride(2) == 1 && (stack.size(1) == 1 || stack.stride(1) == columns);
  const bool heads_follow = stack.size(0) == 1 || stack.stride(0) == between * columns;
  const bool starts = is_aligned(stack) || stack.storage_offset() % columns == 0;
  return rows_follow && heads_follow && starts ? between : 0;
}

// `matrix`: a stack of [Hq, rows, inputs], of which each is `matrix.rows` rows behind the one before. `x` is
// in the dtype of its library if transposed, else in float32.
Tensor project_heads(const Tensor& x_, const MatrixStack& matrix, int64_t rows, bool transposed,
                     const OptionalTensor& tail_) {
  const int64_t tail_width = tail_ ? tail_->size(3) : 0;
  const int64_t width = transposed ? matrix.inputs + tail_width : rows;
  const Tensor out =
      at::empty({x_.size(0), x_.size(1), x_.size(2), width}, x_.options().dtype(matrix.library.dtype));
  if (out.numel() == 0) return out;
  const Tensor x = readable(x_), tail = tail_width > 0 ? readable(*tail_) : x;
  if (x.numel() == 0 || matrix.packed.numel() == 0) {
    out.zero_();
    if (tail_width > 0) out.narrow(3, matrix.inputs, tail_width).copy_(tail);
    return out;
  }
  HeadsParams params{};
  params.matrix.experts = x.size(2);
  params.matrix.inputs = matrix.inputs;
  params.matrix.rows = matrix.rows;
  params.matrix.outputs = rows;
  params.matrix.vectorised = matrix.inputs % 16 == 0 && is_aligned(matrix.packed);
  params.x = token_strides(x);
  params.tail = token_strides(tail);
  params.tokens = x.size(0) * x.size(1);
  params.tokens_of_batch = x.size(1);
  params.heads = x.size(2);
  params.tail_width = tail_width;

  const bool few = params.tokens > 1;
  const int64_t rows_of_group = kSingleSimdgroups * kRowGroupsOfSimdgroup * kSingleRows;
  const int64_t across = transposed ? ceil_div(std::max(matrix.inputs, int64_t(1)), kHeadColumns)
                                    : ceil_div(rows, rows_of_group);
  const std::string kernel = std::string(transposed ? "heads_columns" : "heads_rows") + (few ? "_few" : "");
  const int64_t simdgroups = transposed ? kHeadSimdgroups : kSingleSimdgroups;
  Commands commands;
  commands.add(part_of(matrix.library, kOfHeads), kernel)
      .bind_strided(x, matrix.packed, matrix.scales, matrix.zeros, tail)
      .bind(out)
      .params(params)
      .work(kIssueCyclesOfHeads * static_cast<double>(params.tokens) * static_cast<double>(params.heads) *
                static_cast<double>(rows) * static_cast<double>(matrix.inputs),
            static_cast<double>(x.nbytes() + matrix.packed.nbytes() + out.nbytes()))
      .threadgroups({across, params.heads, few ? ceil_div(params.tokens, kFewPairs) : 1},
                    {simdgroups * kSimdWidth});
  commands.encode();
  return out;
}

Tensor _heads_mm(const Tensor& x, const Tensor& weight, bool transposed, const OptionalTensor& tail) {
  const int64_t between = rows_between_heads(weight);
  if (between == 0) warn_of_copy(weight);
  MatrixStack matrix{{"experts", weight.scalar_type()},
                     between > 0 ? weight : weight.clone(at::MemoryFormat::Contiguous)};
  matrix.scales = matrix.zeros = matrix.packed;
  matrix.experts = weight.size(0);
  matrix.rows = between > 0 ? between : weight.size(1);
  matrix.inputs = weight.size(2);
  return project_heads(transposed ? x : in_dtype(x, at::kFloat), matrix, weight.size(1), transposed, tail);
}

// The matrices where they lie, or copies of them.
MatrixStack quantized_heads(const Tensor& packed, const Tensor& scales, const OptionalTensor& zeros,
                            const WeightFormat& format, c10::ScalarType dtype) {
  const int64_t between = rows_between_heads(packed);
  const bool in_place = between > 0 && rows_between_heads(scales) == between &&
                        (!zeros || rows_between_heads(*zeros) == between) &&
                        (!format.scales_like_activations || scales.scalar_type() == dtype);
  if (!in_place) return packed_matrix(packed, scales, zeros, format, std::nullopt, dtype);
  MatrixStack matrix{quantized_library(format, dtype), packed, scales, zeros.value_or(scales)};
  matrix.experts = packed.size(0);
  matrix.rows = between;
  matrix.inputs = packed.size(2) * 32 / format.bits;
  return matrix;
}

Tensor _heads_quantized(const Tensor& x, const Tensor& packed, const Tensor& scales,
                        const OptionalTensor& zeros, std::string_view format, bool transposed,
                        const OptionalTensor& tail, std::optional<std::string_view> output_dtype) {
  const auto wanted = output_dtype ? dtype_named(*output_dtype) : x.scalar_type();
  const auto dtype = compute_dtype(wanted, {{weight_format(format), scales}});
  const MatrixStack matrix = quantized_heads(packed, scales, zeros, weight_format(format), dtype);
  const OptionalTensor behind = tail ? std::optional(in_dtype(*tail, dtype)) : std::nullopt;
  const Tensor inputs = in_dtype(x, transposed ? dtype : at::kFloat);
  return in_dtype(project_heads(inputs, matrix, packed.size(1), transposed, behind), wanted);
}

}  // namespace

MOE_OPERATOR(_heads_mm)
MOE_OPERATOR(_heads_quantized)

}  // namespace moe_mps
