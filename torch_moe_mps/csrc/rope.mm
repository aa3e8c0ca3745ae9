#include "rope.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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

// The keys, or the queries, are there.
void encode_rope(const Rotation& rotation, const std::optional<Heads>& q, const std::optional<Heads>& k,
                 const std::optional<Heads>& v, const OptionalTensor& k_bias = std::nullopt) {
  const Heads& some = q ? *q : *k;
  const RopeParams params = rope_params(rotation, q, k, v, k_bias);
  Commands commands;
  const c10::ScalarType dtype = some.input.scalar_type();
  Command& command = k_bias ? commands.add({"rope_centred", dtype}, "rope_centred", some.output)
                            : commands.add({"rope", dtype}, "rope", some.output);
  command
      .bind_strided(some.input, k ? k->input : some.input, v ? v->input : some.input, rotation.cos,
                    rotation.sin, q ? q->weight : std::nullopt, k ? k->weight : std::nullopt,
                    v ? v->weight : k_bias, some.output)
      .bind_from(k ? k->output : some.output, k ? k->output_start : 0)
      .bind_from(v ? v->output : some.output, v ? v->output_start : 0)
      .params(params)
      .threadgroups({ceil_div(params.rows, kRopeHeads)}, {kRopeHeads * kSimdWidth});
  commands.encode();
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const OptionalTensor& cos,
                                const OptionalTensor& sin, const HeadNorms& norms, const Turn& turn) {
  const Tensor output = heads_first(q), k_output = heads_first(k);
  if (output.numel() == 0) return {output, k_output};
  const Rotation rotation(q, cos, sin, norms, turn);
  encode_rope(rotation, heads_of(q, norms.q_weight, output, rotation.rotary),
              heads_of(k, norms.k_weight, k_output, rotation.rotary), std::nullopt);
  return {output, k_output};
}

Tensor rope_heads(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin,
                  const OptionalTensor& norm_weight, double norm_eps, double norm_weight_offset,
                  const Turn& turn) {
  const Tensor output = heads_first(x);
  if (output.numel() == 0) return output;
  const Rotation rotation(x, cos, sin, {norm_weight, std::nullopt, norm_eps, norm_weight_offset}, turn);
  encode_rope(rotation, heads_of(x, norm_weight, output, rotation.rotary), std::nullopt, std::nullopt);
  return output;
}

// Where new keys or values are written: where they are kept, or where a copy into that is made from.
Tensor written_for(const Tensor& x, const Tensor& held) {
  return held.stride(3) == 1 ? held : heads_first(x);
}

void keep(const Tensor& held, const Tensor& written) {
  const int64_t tokens = written.size(2);
  if (!written.is_same(held)) held.narrow(2, held.size(2) - tokens, tokens).copy_(written);
}

}  // namespace

Heads heads_of(const Tensor& x, const OptionalTensor& weight, const Tensor& output, int64_t rotary) {
  Heads heads;
  heads.input = rows_contiguous(x);
  heads.weight = contiguous(weight);
  heads.output = output;
  heads.output_start = (output.size(2) - x.size(1)) * output.stride(2);
  heads.params.input = token_strides(heads.input);
  heads.params.output = head_strides(output);
  heads.params.heads = x.size(2);
  heads.params.width = x.size(3);
  heads.params.rotary = rotary;
  heads.params.is_normed = heads.params.has_weight = weight.has_value();
  heads.params.weight_dtype = dtype_code(weight);
  heads.params.norm_factor = 1.0f;
  heads.vectorised = x.size(3) % 8 == 0 && starts_aligned(heads.input) && starts_aligned(output) &&
                     (!weight || starts_aligned(*heads.weight));
  return heads;
}

Rotation::Rotation(const Tensor& x, const OptionalTensor& cos_, const OptionalTensor& sin_,
                   const HeadNorms& norms, const Turn& turn)
    : cos(cos_ ? *cos_ : x.select(2, 0)),
      sin(sin_ ? *sin_ : cos),
      eps(norms.eps),
      weight_offset(norms.weight_offset),
      pairs(turn.pairs),
      rotary(cos_ ? turn.rotary_dim.value_or(cos_->size(2)) : 0),
      rotary_last(turn.rotary_last) {
  if (cos.strides() == sin.strides() && cos.stride(2) == 1) return;
  cos = cos.contiguous();
  sin = sin.contiguous();
}

RopeParams rope_params(const Rotation& rotation, const std::optional<Heads>& q, const std::optional<Heads>& k,
                       const std::optional<Heads>& v, const OptionalTensor& k_bias) {
  const Heads& some = q ? *q : *k;
  const Tensor &cos = rotation.cos, &sin = rotation.sin;
  RopeParams params{};
  params.vectorised = rotation.rotary % 8 == 0 && starts_aligned(cos) && starts_aligned(sin) &&
                      (!k_bias || starts_aligned(*k_bias));
  for (const auto& [heads, target] : {std::pair(&q, &params.q), {&k, &params.k}, {&v, &params.v}}) {
    if (!*heads) continue;
    *target = (*heads)->params;
    params.vectorised = params.vectorised && (*heads)->vectorised;
  }
  params.table_batch_stride = cos.size(0) == 1 ? 0 : cos.stride(0);
  params.table_token_stride = cos.stride(1);
  params.tokens = some.input.size(1);
  params.rows = some.input.size(0) * params.tokens * (params.q.heads + params.k.heads + params.v.heads);
  params.rotary_last = rotation.rotary_last;
  params.pairs = code_of(rotation.pairs, {"half", "interleaved", "interleaved_to_half"});
  params.table_of_pairs = cos.size(2) < rotation.rotary;
  params.table_dtype = dtype_code(cos);
  params.eps = static_cast<float>(rotation.eps);
  params.weight_offset = static_cast<float>(rotation.weight_offset);
  return params;
}

Tensor _rope_cache_(const OptionalTensor& q, const Tensor& k, const OptionalTensor& v, const Tensor& keys_,
                    const OptionalTensor& values_, const OptionalTensor& cos, const OptionalTensor& sin,
                    const HeadNorms& norms, const Turn& turn, const ValueNorm& norm,
                    const OptionalTensor& k_bias, double v_norm_factor) {
  const Tensor output = q ? heads_first(*q) : at::empty({0}, k.options());
  if (k.numel() == 0) return output;
  const Rotation rotation(k, cos, sin, norms, turn);
  std::optional<Heads> queries, values;
  if (q) queries = heads_of(*q, norms.q_weight, output, rotation.rotary);
  const Heads keys = heads_of(k, norms.k_weight, written_for(k, keys_), rotation.rotary);
  if (v) {
    values = heads_of(*v, norm.weight, written_for(*v, *values_), 0);
    values->params.is_normed = norm.norms;
    values->params.norm_factor = static_cast<float>(v_norm_factor);
  }
  encode_rope(rotation, queries, keys, values, contiguous(k_bias));
  keep(keys_, keys.output);
  if (v) keep(*values_, values->output);
  return output;
}

MOE_OPERATOR(rope)
MOE_OPERATOR(rope_heads)
MOE_OPERATOR(_rope_cache_)

}  // namespace moe_mps
