#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr int64_t kMostScores = int64_t(16) << 20;  // 64 MB

Tensor index_topk(const Tensor& q_, const Tensor& k_, const Tensor& weights_, int64_t top_k, double scale,
                  const std::optional<Tensor>& key_range_) {
  const int64_t batch = q_.size(0), tokens = q_.size(1), keys = k_.size(1);
  const Tensor indices = at::empty({batch, tokens, std::min(top_k, keys)}, q_.options().dtype(at::kInt));
  if (indices.numel() == 0) return indices;
  const Tensor q = rows_contiguous(q_), k = rows_contiguous(k_), weights = rows_contiguous(weights_);
  const std::optional<Tensor> key_range = contiguous(key_range_);
  IndexParams params{};
  params.q_batch_stride = q.stride(0);
  params.q_token_stride = q.stride(1);
  params.q_head_stride = q.stride(2);
  params.k_batch_stride = k.stride(0);
  params.k_key_stride = k.stride(1);
  params.tokens = tokens;
  params.heads = q.size(2);
  params.width = q.size(3);
  params.keys = keys;
  params.chosen = indices.size(2);
  params.weights_batch_stride = weights.stride(0);
  params.weights_token_stride = weights.stride(1);
  params.weights_dtype = dtype_code(weights);
  params.has_key_range = key_range.has_value();
  params.vectorised = params.width % 4 == 0 && starts_aligned(k);
  params.scale = static_cast<float>(scale);
  params.tokens_at_once = std::clamp(kMostScores / (batch * keys), int64_t(1), tokens);
  const Tensor scores =
      at::empty({batch, int64_t(params.tokens_at_once), keys}, q.options().dtype(at::kFloat));

  const Library library{"index", q.scalar_type()};
  Commands commands;
  for (int64_t first = 0; first < tokens; first += params.tokens_at_once) {
    const int64_t some = std::min(int64_t(params.tokens_at_once), tokens - first);
    params.first_token = first;
    commands.add(library, "index_scores")
        .bind_strided(q.numel() > 0 ? q : indices)
        .bind_strided(k)
        .bind_strided(weights.numel() > 0 ? weights : indices)
        .bind_or(key_range, indices)
        .bind(scores)
        .params(params)
        .threadgroups({NSUInteger(ceil_div(keys, kIndexKeys)), NSUInteger(some), NSUInteger(batch)},
                      {NSUInteger(kIndexThreads)});
    commands.add(library, "index_select")
        .bind(scores)
        .bind_or(key_range, indices)
        .bind(indices)
        .params(params)
        .threadgroups({NSUInteger(some), NSUInteger(batch)}, {NSUInteger(kSelectThreads)});
  }
  commands.encode();
  return indices;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  implement<index_topk>(m, "index_topk");
}

}  // namespace moe_mps
