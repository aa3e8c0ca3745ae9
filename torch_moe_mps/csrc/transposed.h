// Products with transposed matrices: the gradients of inputs, and stacks that are stored so.
#pragma once
#include <ATen/core/Tensor.h>

#include "matmul_run.h"

namespace moe_mps {

// [..., inputs]: x[..., rows] times the matrices, in the dtype of their kernels. With ids [..., K] the
// matrix of each pair is that of its expert, x is [..., rows] or [..., K, rows], the result [..., K, inputs],
// or with `sums` [..., inputs], and a pair without an expert gives zeros; without ids the matrix is the only
// one.
at::Tensor transposed_product(const at::Tensor& x, const MatrixStack& matrix, const OptionalTensor& ids,
                              bool sums = false);

}  // namespace moe_mps
