#include "transposed.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "bucket.h"
#include "combine.h"
#include "formats.h"
#include "metal/work.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// x is aligned, and `out` is [pairs, inputs]; ids of all pairs, or none. The buckets live as long as the
// commands.
void add_transposed(Commands& commands, const Tensor& x, const MatrixStack& matrix, const Tensor* ids,
                    Buckets& buckets, const Tensor& out) {
  const int64_t pairs = out.size(0), across = ceil_div(matrix.inputs, kTransposedColumns);
  MatmulParams params{};
  params.pairs = pairs;
  params.experts = matrix.experts;
  params.inputs = matrix.inputs;
  params.rows = params.outputs = matrix.rows;
  params.slots = ids != nullptr ? ids->size(1) : 1;
  params.has_ids = ids != nullptr;
  params.x_per_pair = x.numel() == pairs * matrix.rows;
  params.vectorised = matrix.inputs % 16 == 0 && is_aligned(matrix.packed) && is_aligned(out);
  if (ids != nullptr) {
    const BucketTiles tiles{kTilePairs, across, across, true};
    buckets = empty_buckets(pairs, matrix.experts, ids->options(), tiles);
    add_bucket(commands, *ids, matrix.experts, buckets, tiles);
  }
  Command& command = commands.add(part_of(matrix.library, kOfPrompts), "gemm_transposed");
  command.bind(x, matrix.packed, matrix.scales, matrix.zeros, out);
  if (ids != nullptr) {
    command.bind(buckets.pair_order, buckets.tiles);
  } else {
    command.bind(x, x);  // in place of lists of pairs; not read
  }
  const double products = static_cast<double>(pairs) * static_cast<double>(matrix.rows * matrix.inputs);
  command.work(kIssueCyclesOfProduct * products, static_cast<double>(x.nbytes() + out.nbytes()))
      .params(params);
  const Size threads{kGemmSimdgroups * kSimdWidth};
  if (ids != nullptr) {
    command.indirect(buckets.grids, 0, threads);
  } else {
    command.threadgroups({across, ceil_div(pairs, kTilePairs)}, threads);
  }
}

}  // namespace

Tensor transposed_product(const Tensor& x_, const MatrixStack& matrix, const OptionalTensor& ids_,
                          bool sums) {
  at::DimVector shape(ids_ ? ids_->sizes() : x_.sizes());
  if (ids_ && !sums) shape.push_back(0);
  shape.back() = matrix.inputs;
  if (x_.numel() == 0 || matrix.packed.numel() == 0) return at::zeros(shape, x_.options());
  const OptionalTensor ids_of_all = ids_ ? std::optional(as_rows(*ids_)) : std::nullopt;
  const int64_t top_k = ids_ ? ids_of_all->size(1) : 1;
  const int64_t tokens = ids_ ? ids_of_all->size(0) : x_.numel() / matrix.rows;
  const Tensor x = aligned(x_), out = at::empty(shape, x.options());
  const double products =
      static_cast<double>(tokens * top_k) * static_cast<double>(matrix.rows * matrix.inputs);
  const int64_t at_once = std::min(tokens_at_once(tokens, kIssueCyclesOfProduct * products),
                                   std::max<int64_t>(1, kMostElements / (top_k * matrix.rows)));
  for (int64_t start = 0; start < tokens; start += at_once) {
    const int64_t count = std::min(at_once, tokens - start);
    const auto part = [&](const Tensor& all) { return all.view({tokens, -1}).narrow(0, start, count); };
    const OptionalTensor ids =
        ids_ ? std::optional(ids_of_all->narrow(0, start, count).contiguous()) : std::nullopt;
    const Tensor of_pairs =
        sums ? at::empty({count * top_k, matrix.inputs}, x.options()) : part(out).view({count * top_k, -1});
    Buckets buckets;
    Commands commands;
    add_transposed(commands, commands.keep(aligned(part(x))), matrix, ids ? &*ids : nullptr, buckets,
                   of_pairs);
    if (sums)
      add_expert_sum(commands, commands.keep(of_pairs.view({count, top_k, -1})), commands.keep(part(out)));
    commands.encode();
  }
  return out;
}

}  // namespace moe_mps
