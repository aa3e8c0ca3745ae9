#include "bucket.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <tuple>

#include "../shaders/geometry.h"
#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

int64_t binary_digits(int64_t value) {
  int64_t digits = 0;
  for (; value > 0; value >>= 1) ++digits;
  return digits;
}

// The largest number of tiles that `pairs` pairs can make.
int64_t most_tiles(int64_t pairs, int64_t num_experts, int64_t tile_pairs) {
  return std::max<int64_t>(1, std::min(pairs, num_experts + 1) + pairs / tile_pairs);
}

std::tuple<Tensor, Tensor> moe_bucket(const Tensor& ids_, int64_t num_experts) {
  const Tensor ids = ids_.contiguous();
  const Buckets out = empty_buckets(ids.numel(), num_experts, ids.options());
  Commands commands;
  add_bucket(commands, ids, num_experts, out);
  commands.encode();
  return {out.pair_order, out.offsets};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_compute_ids_tpe(const Tensor& ids_, int64_t num_experts,
                                                               int64_t gate_up_rows, int64_t down_rows) {
  constexpr int64_t kRowsPerTile = 64;
  const Tensor ids = ids_.contiguous();
  const int64_t pairs = ids.numel();
  const auto options = ids.options().dtype(at::kInt);
  Tensor tpe = at::empty({num_experts}, options);
  Tensor lists = at::empty({num_experts, pairs}, options);
  Tensor gate_up_args = at::empty({3}, options);
  Tensor down_args = at::empty({3}, options);
  IdsTpeParams params{};
  params.pairs = pairs;
  params.experts = num_experts;
  params.gate_up_tiles = ceil_div(gate_up_rows, kRowsPerTile);
  params.down_tiles = ceil_div(down_rows, kRowsPerTile);
  const int64_t threads = std::clamp(ceil_div(pairs, kSimdWidth) * kSimdWidth, kSimdWidth, kBucketThreads);
  Commands commands;
  commands.add({"bucket", ids.scalar_type()}, "ids_by_expert")
      .bind(pairs > 0 ? ids : tpe, tpe, pairs > 0 ? lists : tpe, gate_up_args, down_args)
      .params(params)
      .threadgroup_memory((num_experts + 1) * sizeof(uint32_t))
      .threadgroups({num_experts + 1}, {threads});
  commands.encode();
  return {tpe, lists, gate_up_args, down_args};
}

}  // namespace

Buckets empty_buckets(int64_t pairs, int64_t num_experts, const at::TensorOptions& like,
                      const std::optional<BucketTiles>& tiles) {
  const auto ints = like.dtype(at::kInt);
  Buckets out{at::empty({pairs}, ints), at::empty({num_experts + 1}, ints)};
  if (tiles) {
    out.tiles = at::empty({most_tiles(pairs, num_experts, tiles->pairs), 4}, ints);
    out.grids = at::empty({6}, ints);
  }
  return out;
}

BucketLaunch bucket_launch(int64_t pairs, int64_t num_experts) {
  // Every threadgroup counts all pairs, so more of them share the scattered writes but repeat the counting.
  // 32768 pairs on an NVIDIA H200: one threadgroup 36 us, 16 of them 9 us. Not measured on an Apple GPU.
  constexpr int64_t kPairsPerGroup = 2048, kMaxGroups = 16;
  constexpr int64_t kPairsPerChunk = 64;  // with fewer, another row of counters costs more; no measurement
  constexpr int64_t kStaticWords = 128;   // declared in the kernel, and room for what a compiler adds
  constexpr int64_t kSimdgroups = kBucketThreads / kSimdWidth;
  const int64_t buckets = num_experts + 1;
  const int64_t most = (kThreadgroupFloats - kStaticWords - 2 * buckets) / (buckets + kLaneSets);
  const int64_t groups = std::clamp<int64_t>(ceil_div(pairs, kPairsPerGroup), 1, kMaxGroups);
  const int64_t run = ceil_div(pairs, groups);
  const int64_t chunks = std::clamp<int64_t>(ceil_div(run, kPairsPerChunk), 1, std::min(kSimdgroups, most));
  // Simdgroups without a chunk still count and scan.
  const int64_t simdgroups = std::max(chunks, std::min(kSimdgroups, ceil_div(buckets, kSimdWidth)));
  return {{groups},
          simdgroups * kSimdWidth,
          (2 * buckets + chunks * (buckets + kLaneSets)) * static_cast<int64_t>(sizeof(uint32_t)),
          chunks,
          ceil_div(ceil_div(run, chunks), kSimdWidth) * kSimdWidth};
}

void add_bucket(Commands& commands, const Tensor& ids, int64_t num_experts, const Buckets& out,
                const std::optional<BucketTiles>& tiles) {
  const int64_t pairs = ids.numel();
  const BucketLaunch launch = bucket_launch(pairs, num_experts);
  BucketParams params{};
  params.pairs = pairs;
  params.experts = num_experts;
  params.chunks = launch.chunks;
  params.chunk = launch.chunk;
  params.upper_digits = binary_digits(num_experts / kLaneSets);
  if (tiles) {
    params.tile_pairs = tiles->pairs;
    params.sentinel_tiles = tiles->sentinels;
    params.columns_a = tiles->columns_a;
    params.columns_b = tiles->columns_b;
  }
  commands.add({"bucket", ids.scalar_type()}, "bucket_pairs")
      .bind(pairs > 0 ? ids : out.offsets, pairs > 0 ? out.pair_order : out.offsets, out.offsets,
            tiles ? out.tiles : out.offsets, tiles ? out.grids : out.offsets)
      .params(params)
      .threadgroup_memory(launch.memory)
      .threadgroups(launch.grid, {launch.threads});
}

MOE_OPERATOR(moe_bucket)
MOE_OPERATOR(moe_compute_ids_tpe)

}  // namespace moe_mps
