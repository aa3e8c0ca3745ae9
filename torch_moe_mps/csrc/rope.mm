#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <string_view>
#include <tuple>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// q or k, and the buffers that a dispatch binds for it.
struct Heads {
  Tensor input;  // its heads are contiguous
  std::optional<Tensor> weight;
  Tensor output;
  RopeHeads params{};
  bool vectorised;
};

Heads heads_of(const Tensor& x, const std::optional<Tensor>& weight) {
  Heads heads;
  heads.input = rows_contiguous(x);
  heads.weight = contiguous(weight);
  heads.output = at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options());
  heads.params.batch_stride = heads.input.stride(0);
  heads.params.token_stride = heads.input.stride(1);
  heads.params.head_stride = heads.input.stride(2);
  heads.params.heads = x.size(2);
  heads.params.width = x.size(3);
  heads.params.has_weight = weight.has_value();
  if (weight) heads.params.weight_dtype = dtype_code(*weight);
  heads.vectorised =
      x.size(3) % 8 == 0 && starts_aligned(heads.input) && (!weight || starts_aligned(*heads.weight));
  return heads;
}

uint32_t pairs_code(std::string_view pairs) {
  if (pairs == "half") return PAIRS_HALF;
  return pairs == "interleaved" ? PAIRS_INTERLEAVED : PAIRS_INTERLEAVED_TO_HALF;
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                const Tensor& sin, const std::optional<Tensor>& q_weight,
                                const std::optional<Tensor>& k_weight, double eps, double weight_offset,
                                std::string_view pairs, std::optional<int64_t> rotary_dim, bool rotary_last) {
  const Heads queries = heads_of(q, q_weight);
  std::optional<Heads> keys;
  if (k) keys = heads_of(*k, k_weight);
  const Tensor k_output = keys ? keys->output : at::empty({0}, q.options());
  const std::tuple<Tensor, Tensor> outputs(queries.output, k_output);
  if (queries.output.numel() == 0) return outputs;

  const bool same_strides = cos.strides() == sin.strides() && cos.stride(2) == 1;
  const Tensor cos_rows = same_strides ? cos : cos.contiguous();
  const Tensor sin_rows = same_strides ? sin : sin.contiguous();
  const int64_t rotary = rotary_dim.value_or(cos.size(2));
  RopeParams params{};
  params.q = queries.params;
  if (keys) params.k = keys->params;
  params.table_batch_stride = cos.size(0) == 1 ? 0 : cos_rows.stride(0);
  params.table_token_stride = cos_rows.stride(1);
  params.rows = q.size(0) * q.size(1) * (params.q.heads + params.k.heads);
  params.tokens = q.size(1);
  params.rotary = rotary;
  params.rotary_last = rotary_last;
  params.pairs = pairs_code(pairs);
  params.table_of_pairs = cos.size(2) < rotary;
  params.table_dtype = dtype_code(cos);
  params.vectorised = queries.vectorised && (!keys || keys->vectorised) && rotary % 8 == 0 &&
                      starts_aligned(cos_rows) && starts_aligned(sin_rows);
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);

  Commands commands;
  commands.add({"rope", q.scalar_type()}, "rope")
      .bind_strided(queries.input)
      .bind_strided(keys ? keys->input : queries.input)
      .bind_strided(cos_rows)
      .bind_strided(sin_rows)
      .bind_or(queries.weight, queries.output)
      .bind_or(keys ? keys->weight : std::nullopt, queries.output)
      .bind(queries.output)
      .bind(keys ? k_output : queries.output)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(params.rows, kRopeHeads))}, {NSUInteger(kRopeHeads * kSimdWidth)});
  commands.encode();
  return outputs;
}

uint32_t layout_code(std::string_view layout) {
  if (layout == "pairs") return TABLE_PAIRS;
  return layout == "halves" ? TABLE_HALVES : TABLE_INTERLEAVED;
}

std::tuple<Tensor, Tensor> rope_tables(const Tensor& position_ids, const Tensor& inv_freq, double scaling,
                                       c10::ScalarType dtype, std::string_view layout) {
  const Tensor positions = position_ids.contiguous(), frequencies = inv_freq.contiguous();
  RopeTableParams params{};
  params.pairs = frequencies.size(0);
  params.angles = positions.numel() * params.pairs;
  params.layout = layout_code(layout);
  params.wide_positions = positions.scalar_type() == at::kLong;
  params.scaling = static_cast<float>(scaling);
  const int64_t width = params.pairs * (params.layout == TABLE_PAIRS ? 1 : 2);
  const auto options = frequencies.options().dtype(dtype);
  const Tensor cos = at::empty({positions.size(0), positions.size(1), width}, options);
  const Tensor sin = at::empty_like(cos);
  if (cos.numel() == 0) return {cos, sin};

  Commands commands;
  commands.add({"rope", dtype}, "rope_tables")
      .bind(positions)
      .bind(frequencies)
      .bind(cos)
      .bind(sin)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(params.angles, kTableThreads))}, {NSUInteger(kTableThreads)});
  commands.encode();
  return {cos, sin};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<rope>(m, "rope");
  implement<rope_tables>(m, "rope_tables");
}

}  // namespace moe_mps
