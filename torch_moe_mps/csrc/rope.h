// The rotary embedding of heads, for the kernels that turn them.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../shaders/params.h"
#include "groups.h"
#include "metal/encoder.h"

namespace moe_mps {

// q, k or v, and the buffers that a dispatch binds for it.
struct Heads {
  at::Tensor input;  // its heads are contiguous
  OptionalTensor weight;
  at::Tensor output;     // [B, heads, T or more, D], its heads are contiguous
  int64_t output_start;  // the element that the first of the last T tokens begins with
  RopeHeads params{};
  bool vectorised;
};

// Strides of x [B, T, heads, D].
Heads heads_of(const at::Tensor& x, const OptionalTensor& weight, const at::Tensor& output, int64_t rotary);

// The norms of heads, which are done where they have weights.
struct HeadNorms {
  const OptionalTensor &q_weight, &k_weight;
  double eps, weight_offset;
};
template <>
struct GroupOf<HeadNorms>
    : MadeBy<aggregate<HeadNorms, const OptionalTensor&, const OptionalTensor&, double, double>> {};

// The norm of values, with the numbers of HeadNorms.
struct ValueNorm {
  bool norms;
  const OptionalTensor& weight;
};
template <>
struct GroupOf<ValueNorm> : MadeBy<aggregate<ValueNorm, bool, const OptionalTensor&>> {};

// The elements of a head that turn, and their pairs.
struct Turn {
  std::string_view pairs;
  std::optional<int64_t> rotary_dim;
  bool rotary_last;
};
template <>
struct GroupOf<Turn> : MadeBy<aggregate<Turn, std::string_view, std::optional<int64_t>, bool>> {};

// The tables and what is the same for all heads. Without tables nothing turns: `x`, [B, T, ...], is bound in
// place of them.
struct Rotation {
  Rotation(const at::Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin, const HeadNorms& norms,
           const Turn& turn);

  at::Tensor cos, sin;  // with the same strides
  double eps, weight_offset;
  std::string_view pairs;
  int64_t rotary;
  bool rotary_last;
};

// The keys, or the queries, are there.
RopeParams rope_params(const Rotation& rotation, const std::optional<Heads>& q, const std::optional<Heads>& k,
                       const std::optional<Heads>& v, const OptionalTensor& k_bias = std::nullopt);

// The operator.
at::Tensor _rope_cache_(const OptionalTensor& q, const at::Tensor& k, const OptionalTensor& v,
                        const at::Tensor& keys_, const OptionalTensor& values_, const OptionalTensor& cos,
                        const OptionalTensor& sin, const HeadNorms& norms, const Turn& turn,
                        const ValueNorm& norm, const OptionalTensor& k_bias, double v_norm_factor = 1.0);

}  // namespace moe_mps
