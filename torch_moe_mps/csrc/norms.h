// The RMSNorm in front of other operators.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "groups.h"
#include "metal/encoder.h"

namespace moe_mps {

struct InputNorm {
  at::Tensor weight;  // contiguous
  double eps, offset;
};

// The norm that an operator's arguments ask for.
std::optional<InputNorm> input_norm(const OptionalTensor& weight, double eps, double offset);
template <>
struct GroupOf<std::optional<InputNorm>> : MadeBy<input_norm> {};

// Adds the norm of the rows x[T, H] and returns its result.
const at::Tensor& add_norm(Commands& commands, const at::Tensor& x, const InputNorm& norm);

// How rms_norm_gated applies its gate, and how many rows share a row of the weight.
struct Gating {
  int64_t groups = 1;
  bool is_sigmoid = false, is_first = false;
};

// Adds rms_norm_gated of the rows of `x`, which may be its result.
void add_gated_norm(Commands& commands, const at::Tensor& x, const at::Tensor& gate, const InputNorm& norm,
                    Gating gating, const at::Tensor& output);

}  // namespace moe_mps
