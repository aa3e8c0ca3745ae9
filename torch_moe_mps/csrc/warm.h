// The matrix that the next operator of a captured token reads, while this thread runs the one before;
// nullptr: none, or the process does not ask for it. Attention leaves memory idle: it brings that matrix
// into the last cache.
#pragma once
#include <ATen/core/Tensor.h>

namespace moe_mps {
inline thread_local const at::Tensor* next_matrix = nullptr;
}  // namespace moe_mps
