#include "tensors.h"

#include <algorithm>

#include "../shaders/params.h"

namespace moe_mps {
namespace {

constexpr int64_t kShortRow = 512;  // elements; one simdgroup holds them in registers
constexpr int64_t kRowsPerThreadgroup = 8;
// Up to this many rows, a row gets all the threads that it can use, for latency. With more rows each thread
// takes 16 elements, for bandwidth (fused_norm_add, 8192 rows of 2048 floats: 97 % of a copy on an H200).
constexpr int64_t kRowsForLatency = 256;

}  // namespace

void check_counted(std::string_view what, int64_t elements, c10::IntArrayRef shape) {
  TORCH_CHECK(elements <= kMostElements, "moe_mps: ", what, " of shape ", shape, " has ", elements,
              " elements, of which a kernel counts ", kMostElements);
}

int64_t span(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return last + 1;
}

RowLayout row_layout(int64_t rows, int64_t width) {
  if (width <= kShortRow && rows > 1) {
    const int64_t per_group = std::min(rows, kRowsPerThreadgroup);
    return {1, {ceil_div(rows, per_group)}, {per_group * kSimdWidth}};
  }
  return row_per_threadgroup(rows, width);
}

RowLayout row_per_threadgroup(int64_t rows, int64_t width, int64_t most_threads) {
  const int64_t elements_per_thread = rows <= kRowsForLatency ? 4 : 16;
  const int64_t simdgroups =
      std::clamp<int64_t>(ceil_div(width, elements_per_thread * kSimdWidth), 1, most_threads / kSimdWidth);
  return {simdgroups, {rows}, {simdgroups * kSimdWidth}};
}

bool rows_start_aligned(int64_t width, std::initializer_list<at::Tensor> tensors) {
  return width % 4 == 0 && std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
           return tensor.storage_offset() % 4 == 0;
         });
}

std::optional<int64_t> row_stride(const at::Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.stride(last) != 1 && tensor.size(last) > 1) return std::nullopt;
  int64_t stride = tensor.size(last), rows = 1;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    if (tensor.size(dim) == 1) continue;
    if (rows == 1) stride = tensor.stride(dim);
    if (tensor.stride(dim) != rows * stride) return std::nullopt;
    rows *= tensor.size(dim);
  }
  return stride;
}

at::Tensor as_rows(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  const int64_t rows = c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
  return tensor.reshape({rows, tensor.size(-1)});
}

at::Tensor as_inputs(const at::Tensor& tensor, const at::Tensor& ids) {
  if (ids.dim() == 2) return tensor;
  if (tensor.dim() == ids.dim()) return as_rows(tensor);
  const int64_t top_k = ids.size(-1);
  return tensor.reshape({ids.numel() / top_k, top_k, tensor.size(-1)});
}

at::Tensor rows_contiguous(const at::Tensor& tensor) {
  return tensor.size(-1) == 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

OptionalTensor rows_contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? std::optional(rows_contiguous(*tensor)) : std::nullopt;
}

bool starts_aligned(const at::Tensor& tensor, int64_t elements) {
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) % elements != 0) return false;
  }
  return tensor.storage_offset() % elements == 0;
}

uint32_t dtype_code(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::ScalarType::Float: return DTYPE_FLOAT;
    case at::ScalarType::Half: return DTYPE_HALF;
    default:
      TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "moe_mps: no kernel for dtype ",
                  tensor.scalar_type());
      return DTYPE_BFLOAT;
  }
}

uint32_t dtype_code(const OptionalTensor& tensor) {
  return tensor ? dtype_code(*tensor) : DTYPE_FLOAT;
}

uint32_t code_of(std::string_view name, std::initializer_list<std::string_view> names) {
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK(found != names.end(), "moe_mps: no kernel for ", name);
  return found - names.begin();
}

at::Tensor vector_rows(const at::Tensor& tensor) {
  const at::Tensor rows = rows_contiguous(tensor);
  return starts_aligned(rows) ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

TokenStrides token_strides(const OptionalTensor& x) {
  if (!x) return {};
  if (x->dim() == 1) return {0, 0, uint64_t(x->stride(0))};
  return {uint64_t(x->stride(0)), uint64_t(x->stride(1)), uint64_t(x->stride(2))};
}

TokenStrides head_strides(const at::Tensor& x) {
  return {uint64_t(x.stride(0)), uint64_t(x.stride(2)), uint64_t(x.stride(1))};
}

bool is_aligned(const at::Tensor& tensor) {
  return tensor.storage_offset() * tensor.element_size() % 16 == 0;
}

at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor rows = tensor.contiguous();
  return is_aligned(rows) ? rows : rows.clone();
}

c10::ScalarType dtype_named(std::string_view name) {
  return name == "float32" ? at::kFloat : name == "float16" ? at::kHalf : at::kBFloat16;
}

at::Tensor in_dtype(const at::Tensor& tensor, c10::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? std::optional(tensor->contiguous()) : std::nullopt;
}

OptionalTensor converted(const OptionalTensor& tensor, c10::ScalarType dtype) {
  const OptionalTensor rows = contiguous(tensor);
  return rows ? std::optional(in_dtype(*rows, dtype)) : rows;
}

}  // namespace moe_mps
