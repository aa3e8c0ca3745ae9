#include "rope.h"

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

Tensor heads_first(const Tensor& x) {
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options());
}

uint32_t pairs_code(std::string_view pairs) {
  if (pairs == "half") return PAIRS_HALF;
  return pairs == "interleaved" ? PAIRS_INTERLEAVED : PAIRS_INTERLEAVED_TO_HALF;
}

void encode_rope(const char* kernel, const Rotation& rotation, const Heads& q, const std::optional<Heads>& k,
                 const std::optional<Heads>& v, const OptionalTensor& k_bias = std::nullopt) {
  const RopeParams params = rope_params(rotation, q, k, v);
  Commands commands;
  commands.add({"rope", q.input.scalar_type()}, kernel)
      .bind_strided(q.input)
      .bind_strided(k ? k->input : q.input)
      .bind_strided(v ? v->input : q.input)
      .bind_strided(rotation.cos)
      .bind_strided(rotation.sin)
      .bind_or(q.weight, q.output)
      .bind_or(k ? k->weight : std::nullopt, q.output)
      .bind_or(v ? v->weight : k_bias, q.output)
      .bind(q.output)
      .bind_strided(k ? k->output : q.output, k ? k->output_start : 0)
      .bind_strided(v ? v->output : q.output, v ? v->output_start : 0)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(params.rows, kRopeHeads))}, {NSUInteger(kRopeHeads * kSimdWidth)});
  commands.encode();
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const OptionalTensor& k, const OptionalTensor& cos,
                                const OptionalTensor& sin, const OptionalTensor& q_weight,
                                const OptionalTensor& k_weight, double eps, double weight_offset,
                                std::string_view pairs, std::optional<int64_t> rotary_dim, bool rotary_last) {
  const Tensor output = heads_first(q), k_output = k ? heads_first(*k) : at::empty({0}, q.options());
  if (output.numel() == 0) return {output, k_output};
  const Rotation rotation(q, cos, sin, eps, weight_offset, pairs, rotary_dim, rotary_last);
  std::optional<Heads> keys;
  if (k) keys = heads_of(*k, k_weight, k_output, rotation.rotary);
  encode_rope("rope", rotation, heads_of(q, q_weight, output, rotation.rotary), keys, std::nullopt);
  return {output, k_output};
}

Tensor index_keys_(const Tensor& k_, const Tensor& keys_, const Tensor& weight, const OptionalTensor& bias,
                   double eps, const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& q,
                   std::string_view pairs, std::optional<int64_t> rotary_dim, bool rotary_last,
                   const OptionalTensor& q_weight, double weight_offset) {
  const Tensor output = q ? heads_first(*q) : at::empty({0}, k_.options());
  if (k_.numel() == 0) return output;
  const Tensor k = k_.unsqueeze(2), keys = rows_contiguous(keys_), slots = keys.unsqueeze(1);
  const Rotation rotation(k, cos, sin, eps, weight_offset, pairs, rotary_dim, rotary_last);
  const Heads of_keys = heads_of(k, weight, slots, rotation.rotary);
  Heads queries = of_keys;  // none
  queries.params.heads = 0;
  queries.output = *of_keys.weight;
  if (q && output.numel() > 0) queries = heads_of(*q, q_weight, output, rotation.rotary);
  if (bias) {
    const Tensor rows = in_dtype(bias->contiguous(), weight.scalar_type());
    queries.vectorised = queries.vectorised && starts_aligned(rows);
    encode_rope("index_keys", rotation, queries, of_keys, std::nullopt, rows);
  } else {
    encode_rope("rope", rotation, queries, of_keys, std::nullopt);
  }
  if (!keys.is_same(keys_)) keys_.copy_(keys);
  return output;
}

uint32_t layout_code(std::string_view layout) {
  if (layout == "pairs") return TABLE_PAIRS;
  return layout == "halves" ? TABLE_HALVES : TABLE_INTERLEAVED;
}

std::tuple<Tensor, Tensor> rope_tables(const Tensor& position_ids, const Tensor& inv_freq, double scaling,
                                       c10::ScalarType dtype, std::string_view layout,
                                       const OptionalTensor& axes) {
  const Tensor positions = position_ids.contiguous(), frequencies = inv_freq.contiguous();
  const Tensor of_pairs = axes ? axes->contiguous() : frequencies;
  const int64_t batch = positions.size(-2), tokens = positions.size(-1);
  RopeTableParams params{};
  params.pairs = frequencies.size(0);
  params.angles = batch * tokens * params.pairs;
  params.axes = axes ? positions.size(0) : 0;
  params.layout = layout_code(layout);
  params.wide_positions = positions.scalar_type() == at::kLong;
  params.scaling = static_cast<float>(scaling);
  const int64_t width = params.pairs * (params.layout == TABLE_PAIRS ? 1 : 2);
  const auto options = frequencies.options().dtype(dtype);
  const Tensor cos = at::empty({batch, tokens, width}, options);
  const Tensor sin = at::empty_like(cos);
  if (cos.numel() == 0) return {cos, sin};

  Commands commands;
  commands.add({"rope", dtype}, "rope_tables")
      .bind(positions)
      .bind(frequencies)
      .bind(cos)
      .bind(sin)
      .bind(of_pairs)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(params.angles, kTableThreads))}, {NSUInteger(kTableThreads)});
  commands.encode();
  return {cos, sin};
}

}  // namespace

Heads heads_of(const Tensor& x, const OptionalTensor& weight, const Tensor& output, int64_t rotary) {
  Heads heads;
  heads.input = rows_contiguous(x);
  heads.weight = contiguous(weight);
  heads.output = output;
  heads.output_start = (output.size(2) - x.size(1)) * output.stride(2);
  heads.params.batch_stride = heads.input.stride(0);
  heads.params.token_stride = heads.input.stride(1);
  heads.params.head_stride = heads.input.stride(2);
  heads.params.output_batch_stride = output.stride(0);
  heads.params.output_head_stride = output.stride(1);
  heads.params.output_token_stride = output.stride(2);
  heads.params.heads = x.size(2);
  heads.params.width = x.size(3);
  heads.params.rotary = rotary;
  heads.params.is_normed = heads.params.has_weight = weight.has_value();
  heads.params.weight_dtype = dtype_code(weight);
  heads.vectorised = x.size(3) % 8 == 0 && starts_aligned(heads.input) && starts_aligned(output) &&
                     (!weight || starts_aligned(*heads.weight));
  return heads;
}

Rotation::Rotation(const Tensor& x, const OptionalTensor& cos_, const OptionalTensor& sin_, double eps,
                   double weight_offset, std::string_view pairs, std::optional<int64_t> rotary_dim,
                   bool rotary_last)
    : cos(cos_ ? *cos_ : x.select(2, 0)),
      sin(sin_ ? *sin_ : cos),
      eps(eps),
      weight_offset(weight_offset),
      pairs(pairs),
      rotary(cos_ ? rotary_dim.value_or(cos_->size(2)) : 0),
      rotary_last(rotary_last) {
  if (cos.strides() == sin.strides() && cos.stride(2) == 1) return;
  cos = cos.contiguous();
  sin = sin.contiguous();
}

RopeParams rope_params(const Rotation& rotation, const Heads& q, const std::optional<Heads>& k,
                       const std::optional<Heads>& v) {
  const Tensor &cos = rotation.cos, &sin = rotation.sin;
  RopeParams params{};
  params.q = q.params;
  if (k) params.k = k->params;
  if (v) params.v = v->params;
  params.table_batch_stride = cos.size(0) == 1 ? 0 : cos.stride(0);
  params.table_token_stride = cos.stride(1);
  params.tokens = q.input.size(1);
  params.rows = q.input.size(0) * params.tokens * (params.q.heads + params.k.heads + params.v.heads);
  params.rotary_last = rotation.rotary_last;
  params.pairs = pairs_code(rotation.pairs);
  params.table_of_pairs = cos.size(2) < rotation.rotary;
  params.table_dtype = dtype_code(cos);
  params.vectorised = q.vectorised && (!k || k->vectorised) && (!v || v->vectorised) &&
                      rotation.rotary % 8 == 0 && starts_aligned(cos) && starts_aligned(sin);
  params.eps = static_cast<float>(rotation.eps);
  params.weight_offset = static_cast<float>(rotation.weight_offset);
  return params;
}

Tensor rope_cache_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys_,
                   const Tensor& values_, const OptionalTensor& cos, const OptionalTensor& sin,
                   const OptionalTensor& q_weight, const OptionalTensor& k_weight, double eps,
                   double weight_offset, std::string_view pairs, std::optional<int64_t> rotary_dim,
                   bool rotary_last, bool norm_v, const OptionalTensor& v_weight) {
  const Tensor output = heads_first(q);
  if (output.numel() == 0) return output;
  const Rotation rotation(q, cos, sin, eps, weight_offset, pairs, rotary_dim, rotary_last);
  const bool in_place = keys_.stride(3) == 1 && values_.stride(3) == 1;
  const Tensor k_output = in_place ? keys_ : heads_first(k), v_output = in_place ? values_ : heads_first(v);
  Heads values = heads_of(v, v_weight, v_output, 0);
  values.params.is_normed = norm_v;
  encode_rope("rope", rotation, heads_of(q, q_weight, output, rotation.rotary),
              heads_of(k, k_weight, k_output, rotation.rotary), values);
  if (!in_place) {
    keys_.narrow(2, keys_.size(2) - k.size(1), k.size(1)).copy_(k_output);
    values_.narrow(2, values_.size(2) - v.size(1), v.size(1)).copy_(v_output);
  }
  return output;
}

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<rope>(m, "rope");
  implement<rope_cache_>(m, "rope_cache_");
  implement<index_keys_>(m, "index_keys_");
  implement<rope_tables>(m, "rope_tables");
}

}  // namespace moe_mps
