// What all operators of attention share.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../shaders/params.h"
#include "attention_plan.h"
#include "groups.h"
#include "metal/encoder.h"

namespace moe_mps {

// Groups of the operators' arguments, as ops/families/attention.py describes them.
struct Softmax {
  std::optional<double> softcap;
  OptionalTensor sinks;
};
struct Gate {
  OptionalTensor factors;
  bool is_softplus = false;
};
inline Gate gate_of(const OptionalTensor& gate, std::string_view activation) {
  return {gate, activation == "softplus"};
}
template <>
struct GroupOf<Softmax> : MadeBy<aggregate<Softmax, std::optional<double>, const OptionalTensor&>> {};
template <>
struct GroupOf<Gate> : MadeBy<gate_of> {};

// Keys or values with strides that kernels can count in, and rows that start on a multiple of so many
// elements; `params` say where they lie.
at::Tensor readable_rows(const at::Tensor& given, int64_t alignment, CacheParams& params);
// A mask with strides that kernels can count in.
OptionalTensor readable_mask(const OptionalTensor& mask);

// Order and mask of the keys, for params with their numbers of tokens and keys.
void set_mask(AttentionParams& params, const OptionalTensor& mask, std::optional<int64_t> window,
              int64_t lookahead);
void set_gate(AttentionParams& params, const OptionalTensor& gate, bool is_softplus);
void set_softmax(AttentionParams& params, const OptionalTensor& sinks, std::optional<double> softcap,
                 double scale);

// What the chunks of a plan leave for attention_merge; none for one chunk.
OptionalTensor partials_of(const AttentionPlan& plan, const AttentionParams& params, const at::Tensor& q);
void add_merge(Commands& commands, c10::ScalarType dtype, const AttentionPlan& plan,
               const AttentionParams& params, const at::Tensor& partials, const OptionalTensor& sinks,
               const OptionalTensor& gate, const at::Tensor& output);

}  // namespace moe_mps
