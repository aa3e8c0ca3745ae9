// Products with transposed quantised matrices: the gradients of inputs.
#pragma once
#include <ATen/core/Tensor.h>

#include "matmul_run.h"

namespace moe_mps {

// [..., inputs] in dtype `out`: x[..., rows] times the matrices. With ids [T, K] the matrix of each pair is
// that of its expert, x is [T, K, rows], and a pair without an expert gives zeros; without, it is the only
// one.
at::Tensor transposed_product(const at::Tensor& x, const MatrixStack& matrix, const OptionalTensor& ids,
                              c10::ScalarType out);

}  // namespace moe_mps
