#include "transposed.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "bucket.h"
#include "metal/work.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// All are contiguous, and `out` is [pairs, inputs].
void encode_transposed(const Tensor& x, const MatrixStack& matrix, const OptionalTensor& ids,
                       const Tensor& out) {
  const int64_t pairs = out.size(0), slices = ceil_div(matrix.inputs, kHeadColumns);
  TransposedParams params{};
  params.matrix.pairs = pairs;
  params.matrix.experts = matrix.experts;
  params.matrix.inputs = matrix.inputs;
  params.matrix.rows = params.matrix.outputs = matrix.rows;
  params.matrix.has_ids = ids.has_value();
  params.out_dtype = dtype_code(out);
  Buckets buckets;
  Commands commands;
  if (ids) {
    const BucketTiles tiles{kTransposedPairs, slices, slices, true};
    buckets = empty_buckets(pairs, matrix.experts, ids->options(), tiles);
    add_bucket(commands, *ids, matrix.experts, buckets, tiles);
  }
  Command& command = commands.add(matrix.library, "transposed_tiles");
  command.bind(x, matrix.packed, matrix.scales, matrix.biases, out);
  if (ids) {
    command.bind(buckets.pair_order, buckets.tiles);
  } else {
    command.bind(x, x);  // in place of lists of pairs; not read
  }
  const double products = static_cast<double>(pairs) * static_cast<double>(matrix.rows * matrix.inputs);
  command.work(kSlotsOfTransposed * products, static_cast<double>(x.nbytes() + out.nbytes())).params(params);
  const Size threads{kHeadSimdgroups * kSimdWidth};
  if (ids) {
    command.indirect(buckets.grids, 0, threads);
  } else {
    command.threadgroups({slices, ceil_div(pairs, kTransposedPairs)}, threads);
  }
  commands.encode();
}

}  // namespace

Tensor transposed_product(const Tensor& x_, const MatrixStack& matrix, const OptionalTensor& ids_,
                          c10::ScalarType dtype) {
  at::DimVector shape(x_.sizes());
  shape.back() = matrix.inputs;
  const auto options = x_.options().dtype(dtype);
  if (x_.numel() == 0 || matrix.packed.numel() == 0) return at::zeros(shape, options);
  const Tensor x = x_.contiguous();
  Tensor out = at::empty(shape, options);
  const int64_t slots = ids_ ? ids_->size(1) : 1, tokens = x.numel() / x.size(-1) / slots;
  const double products = static_cast<double>(x.numel()) * static_cast<double>(matrix.inputs);
  const int64_t at_once = tokens_at_once(tokens, kSlotsOfTransposed * products);
  for (int64_t start = 0; start < tokens; start += at_once) {
    const int64_t count = std::min(at_once, tokens - start);
    const auto part = [&](const Tensor& all) {
      return all.view({tokens * slots, -1}).narrow(0, start * slots, count * slots);
    };
    const OptionalTensor ids =
        ids_ ? std::optional(ids_->narrow(0, start, count).contiguous()) : std::nullopt;
    encode_transposed(part(x), matrix, ids, part(out));
  }
  return out;
}

}  // namespace moe_mps
