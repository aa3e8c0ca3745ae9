// How tensors are handed to kernels, and how rows are laid on threads.
#pragma once
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "../shaders/geometry.h"
#include "metal/encoder.h"

namespace moe_mps {

struct RowLayout {
  int64_t simdgroups_per_row;
  Size grid;
  Size threads;
};

// Threads for `rows` rows of `width` elements, of which a thread keeps up to 16 in registers.
RowLayout row_layout(int64_t rows, int64_t width);

// The same for kernels that always take a whole threadgroup for a row, of at most `most_threads`.
RowLayout row_per_threadgroup(int64_t rows, int64_t width, int64_t most_threads = kNormThreads);

// Whether every row of every tensor starts on a multiple of 4 elements, which vector loads need.
bool rows_start_aligned(int64_t width, std::initializer_list<at::Tensor> tensors);

// The distance in elements of the tensor's rows, where it is the same from each to the next and rows lie in
// one piece.
std::optional<int64_t> row_stride(const at::Tensor& tensor);

// The tensor, or a copy of it, with its last dimension in one piece.
at::Tensor rows_contiguous(const at::Tensor& tensor);

// Whether each row of a tensor of any strides starts on a multiple of 4 elements.
bool starts_aligned(const at::Tensor& tensor);

// The DTYPE_* code of shaders/params.h.
uint32_t dtype_code(const at::Tensor& tensor);

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& tensor);

// A contiguous tensor whose first element lies at a multiple of 16 bytes; the same one where it is so
// already.
at::Tensor aligned(const at::Tensor& tensor);
bool is_aligned(const at::Tensor& tensor);

// Before an argument of an operator is written in place: an error if it shares memory with one that is read
// (undefined: not given). The check is not part of the signature, which has no addresses.
void prepare_write(const char* operator_name, const char* argument, const at::Tensor& written,
                   std::initializer_list<std::pair<const char*, at::Tensor>> read);

}  // namespace moe_mps
