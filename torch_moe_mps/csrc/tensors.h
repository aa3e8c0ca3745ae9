// How tensors are passed to kernels, and how many threads a row gets.
#pragma once
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string_view>

#include "../shaders/geometry.h"
#include "../shaders/params.h"
#include "metal/encoder.h"

namespace moe_mps {

// Kernels count in 32 bits what is known to be no more than this; what may be more is said or copied.
constexpr int64_t kMostElements = UINT32_MAX;

// Refuses a tensor of which a kernel would have to count more elements; `what` names it.
void check_counted(std::string_view what, int64_t elements, c10::IntArrayRef shape);

// Elements from the first of a tensor in memory to its last, both included.
int64_t span(const at::Tensor& tensor);

struct RowLayout {
  int64_t simdgroups_per_row;
  Size grid;
  Size threads;
};

// The threads for `rows` rows of `width` elements; a thread keeps up to 16 elements in registers.
RowLayout row_layout(int64_t rows, int64_t width);

// The same for kernels in which a whole threadgroup, of at most `most_threads`, takes a row.
RowLayout row_per_threadgroup(int64_t rows, int64_t width, int64_t most_threads = kNormThreads);

// Whether every row of every tensor starts on a multiple of 4 elements, which vector loads need.
bool rows_start_aligned(int64_t width, std::initializer_list<at::Tensor> tensors);

// [..., W] as [T, W]: the tensor itself if it is so, a view where strides allow one.
at::Tensor as_rows(const at::Tensor& tensor);

// The same of an input of experts, with their ids [..., K]: [..., W] as [T, W], [..., K, W] as [T, K, W].
at::Tensor as_inputs(const at::Tensor& tensor, const at::Tensor& ids);

// The distance in elements from each row of the tensor to the next; nullopt if it varies, or if the elements
// of a row are not contiguous.
std::optional<int64_t> row_stride(const at::Tensor& tensor);

// The tensor if the elements of each row are contiguous, else a contiguous copy.
at::Tensor rows_contiguous(const at::Tensor& tensor);
OptionalTensor rows_contiguous(const OptionalTensor& tensor);
// The same with rows that start where vectors do.
at::Tensor vector_rows(const at::Tensor& tensor);

// Whether each row of a tensor of any strides starts on a multiple of so many elements.
bool starts_aligned(const at::Tensor& tensor, int64_t elements = 4);

// The strides of [B, T, heads, ...]; of what all tokens share, [heads], the first two are 0. Zeros without x.
TokenStrides token_strides(const OptionalTensor& x);
// Strides of [B, heads, T, ...].
TokenStrides head_strides(const at::Tensor& x);

// The DTYPE_* code of shaders/params.h; without a tensor, which no kernel reads then, DTYPE_FLOAT.
uint32_t dtype_code(const at::Tensor& tensor);
uint32_t dtype_code(const OptionalTensor& tensor);

// The place of a choice's name among all of them, which shaders/params number in this order.
uint32_t code_of(std::string_view name, std::initializer_list<std::string_view> names);

// The dtype of a name, as ops/_checks.py has them.
c10::ScalarType dtype_named(std::string_view name);

// The tensor in a dtype; itself if it has that dtype already: at::Tensor::to calls the dispatcher.
at::Tensor in_dtype(const at::Tensor& tensor, c10::ScalarType dtype);

OptionalTensor contiguous(const OptionalTensor& tensor);
// The tensor made contiguous, in `dtype`.
OptionalTensor converted(const OptionalTensor& tensor, c10::ScalarType dtype);

// The tensor if it is contiguous and starts at a multiple of 16 bytes, else a copy that does.
at::Tensor aligned(const at::Tensor& tensor);
bool is_aligned(const at::Tensor& tensor);

}  // namespace moe_mps
