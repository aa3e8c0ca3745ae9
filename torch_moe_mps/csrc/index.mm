#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr int64_t kMostScores = int64_t(16) << 20;  // 64 MB

Tensor _index_topk(const Tensor& q_, const Tensor& k_, const OptionalTensor& weights_, int64_t top_k,
                   double scale, const OptionalTensor& key_range_, std::string_view reduce, int64_t block,
                   int64_t tail, int64_t keys, bool as_bits) {
  const int64_t batch = q_.size(0), tokens = q_.size(1), heads = q_.size(2), stored = k_.size(1);
  const bool of_heads = reduce == "heads", is_pooled = of_heads && block > 1;
  const int64_t groups = of_heads ? 1 : heads;
  const int64_t rows = is_pooled ? stored : ceil_div(stored, block);
  if (!is_pooled) keys = stored;
  const int64_t chosen = std::min(top_k, rows);
  const int64_t results = as_bits ? ceil_div(keys, kSimdWidth) : chosen + (is_pooled && tail > 0 ? 1 : 0);
  Tensor indices = at::empty({batch, groups, tokens, results}, q_.options().dtype(at::kInt));
  if (of_heads && !as_bits) indices = indices.squeeze(1);
  if (indices.numel() == 0) return indices;
  const Tensor q = rows_contiguous(q_), k = rows_contiguous(k_);
  const OptionalTensor weights = rows_contiguous(weights_);
  const OptionalTensor key_range = contiguous(key_range_);
  IndexParams params{};
  params.q = token_strides(q);
  params.k = token_strides(k);
  params.weights = token_strides(weights);
  params.tokens = tokens;
  params.heads = heads;
  params.groups = groups;
  params.width = q.size(3);
  params.keys = keys;
  params.rows = rows;
  params.block = block;
  params.is_pooled = is_pooled;
  params.tail = tail;
  params.chosen = chosen;
  params.slots = results;
  params.as_bits = as_bits;
  params.has_weights = weights.has_value();
  params.weights_dtype = dtype_code(weights);
  params.has_key_range = key_range.has_value();
  params.vectorised = params.width % 4 == 0 && starts_aligned(k);
  params.scale = static_cast<float>(scale);
  const int64_t a_token = std::max(batch * groups * rows, int64_t(1));
  params.tokens_at_once = std::clamp(kMostScores / a_token, int64_t(1), tokens);
  const Tensor scores =
      at::empty({batch, groups, int64_t(params.tokens_at_once), rows}, q.options().dtype(at::kFloat));

  const Library library{"index", q.scalar_type()};
  const Tensor& none = indices;
  Commands commands;
  for (int64_t first = 0; first < tokens; first += params.tokens_at_once) {
    const int64_t some = std::min(int64_t(params.tokens_at_once), tokens - first);
    params.first_token = first;
    if (rows > chosen && of_heads) {
      commands.add(library, "index_scores", none)
          .bind_strided(q.numel() > 0 ? q : none, k, weights && weights->numel() > 0 ? *weights : none)
          .bind(key_range, scores)
          .params(params)
          .threadgroups({ceil_div(rows, kIndexKeys), some, batch}, {kIndexThreads});
    } else if (rows > chosen) {
      commands.add(library, "index_block_scores", none)
          .bind_strided(q, k)
          .bind(key_range, scores)
          .params(params)
          .threadgroups({ceil_div(rows, kIndexSimdgroups), some, batch}, {kIndexThreads});
    }
    commands.add(library, "index_select", none)
        .bind(rows > 0 ? scores : none, key_range, indices)
        .params(params)
        .threadgroups({some, groups, batch}, {kSelectThreads});
  }
  commands.encode();
  return indices;
}

}  // namespace

MOE_OPERATOR(_index_topk)

}  // namespace moe_mps
