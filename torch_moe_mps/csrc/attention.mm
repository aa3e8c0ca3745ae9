#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// Up to this many keys one dispatch without chunks is faster than two, of which the second merges the chunks.
// No measurement.
constexpr int64_t kSingleChunk = 1024;
constexpr int64_t kSmallestChunk = 256;
constexpr int64_t kEnoughThreadgroups = 1024;  // more do not help even the largest GPU; no measurement
constexpr int64_t kChunkStep = kAttentionSimdgroups * kSimdWidth;

// How many keys a threadgroup takes.
int64_t chunk_of(int64_t keys, int64_t groups) {
  if (keys <= kSingleChunk) return std::max<int64_t>(keys, 1);
  const int64_t most = ceil_div(keys, kSmallestChunk);
  const int64_t chunks = std::min(most, ceil_div(kEnoughThreadgroups, groups));
  return ceil_div(ceil_div(keys, chunks), kChunkStep) * kChunkStep;
}

void set_strides(AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  params.q_batch_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  params.q_token_stride = q.stride(2);
  params.k_batch_stride = k.stride(0);
  params.k_head_stride = k.stride(1);
  params.k_key_stride = k.stride(2);
  params.v_batch_stride = v.stride(0);
  params.v_head_stride = v.stride(1);
  params.v_key_stride = v.stride(2);
}

void set_mask(AttentionParams& params, const std::optional<Tensor>& mask, std::optional<int64_t> window) {
  if (!mask) {
    params.window = std::min(window.value_or(0), int64_t(params.keys));
    if (window) params.first_key = std::max<int64_t>(0, int64_t(params.keys) - params.tokens - *window + 1);
    return;
  }
  params.mask_kind = mask->scalar_type() == at::kBool ? MASK_BOOL : MASK_ADDITIVE;
  if (params.mask_kind == MASK_ADDITIVE) params.mask_dtype = dtype_code(*mask);
  params.mask_batch_stride = mask->size(0) == 1 ? 0 : mask->stride(0);
  params.mask_token_stride = mask->stride(2);
  params.mask_key_stride = mask->stride(3);
}

Tensor attention_sinks(const Tensor& q_, const Tensor& k_, const Tensor& v_,
                       const std::optional<Tensor>& sinks_, double scale, const std::optional<Tensor>& mask,
                       std::optional<int64_t> window) {
  const int64_t batch = q_.size(0), heads = q_.size(1), tokens = q_.size(2), keys = k_.size(2);
  Tensor output = at::empty({batch, tokens, heads, v_.size(3)}, q_.options());
  if (output.numel() == 0) return output;
  if (keys == 0) return output.zero_();
  const Tensor q = rows_contiguous(q_), k = rows_contiguous(k_), v = rows_contiguous(v_);
  const std::optional<Tensor> sinks = contiguous(sinks_);

  AttentionParams params{};
  set_strides(params, q, k, v);
  params.tokens = tokens;
  params.heads = heads;
  params.key_heads = k.size(1);
  params.keys = keys;
  set_mask(params, mask, window);
  params.width = q.size(3);
  params.value_width = v.size(3);
  params.has_sinks = sinks.has_value();
  if (sinks) params.sinks_dtype = dtype_code(*sinks);
  params.vectorised = params.width % 8 == 0 && params.value_width % 8 == 0 && starts_aligned(q) &&
                      starts_aligned(k) && starts_aligned(v);
  params.rows = batch * tokens * heads;
  params.scale = static_cast<float>(scale);

  const int64_t queries_of_head = heads / k.size(1) * tokens;
  const int64_t queries = queries_of_head == 1 ? 1 : kAttentionQueries;
  const int64_t blocks = ceil_div(queries_of_head, queries);
  const int64_t seen = keys - params.first_key;
  params.chunk = chunk_of(seen, batch * k.size(1) * blocks);
  params.chunks = std::max<int64_t>(1, ceil_div(seen, params.chunk));
  std::optional<Tensor> partials;
  if (params.chunks > 1) {
    partials = at::empty({int64_t(params.chunks) * params.rows * (params.value_width + 2)},
                         q.options().dtype(at::kFloat));
  }

  const int64_t widest = std::max(params.width, params.value_width);
  const Library library{"attention", q.scalar_type()};
  const NSUInteger threads = kAttentionSimdgroups * kSimdWidth;
  Commands commands;
  commands
      .add(library, (queries == 1 ? "attention1_" : "attention2_") + std::to_string(widest <= 64    ? 64
                                                                                    : widest <= 128 ? 128
                                                                                                    : 256))
      .bind_strided(q)
      .bind_strided(k)
      .bind_strided(v)
      .bind_strided(mask ? *mask : output)
      .bind_or(sinks, output)
      .bind(output)
      .bind_or(partials, output)
      .params(params)
      .threadgroups({NSUInteger(params.chunks), NSUInteger(blocks), NSUInteger(batch * k.size(1))},
                    {threads});
  if (partials) {
    commands.add(library, "attention_merge")
        .bind(*partials)
        .bind_or(sinks, output)
        .bind(output)
        .params(params)
        .threadgroups({NSUInteger(ceil_div(params.rows, kAttentionSimdgroups))}, {threads});
  }
  commands.encode();
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<attention_sinks>(m, "attention_sinks");
}

}  // namespace moe_mps
