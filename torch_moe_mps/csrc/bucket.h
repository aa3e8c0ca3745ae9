// Sorting pairs by expert, as the experts' matmuls use it.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "metal/encoder.h"

namespace moe_mps {

// The most experts that moe_bucket takes: MAX_EXPERTS of ops/_checks.py. Their counters fit into threadgroup
// memory.
constexpr int64_t kMaxBuckets = 1024;

// Tiles of pairs of one expert, and the grids of two matmuls over them.
struct BucketTiles {
  int64_t pairs = 0;  // the most pairs of a tile
  int64_t columns_a = 1, columns_b = 1;
  bool sentinels = false;  // pairs without an expert get tiles too, of expert -1, behind the others
};

// Outputs of the dispatch: contiguous tensors of int32.
struct Buckets {
  at::Tensor pair_order;  // [pairs]
  at::Tensor offsets;     // [num_experts + 1]
  at::Tensor tiles = {};  // [most tiles, 4]: expert, first position in pair_order, count, 0; ascending
  at::Tensor grids = {};  // [6]: columns_a, tiles, 1, columns_b, tiles, 1; without a tile one of count 0
};

// Empty outputs for `pairs` pairs; `tiles` and `grids` only if a tile has pairs.
Buckets empty_buckets(int64_t pairs, int64_t num_experts, const at::TensorOptions& like,
                      const std::optional<BucketTiles>& tiles = std::nullopt);

struct BucketLaunch {
  Size grid;
  int64_t threads, memory;
  int64_t chunks, chunk;  // see BucketParams
};

BucketLaunch bucket_launch(int64_t pairs, int64_t num_experts);

// Adds the dispatch to `commands`. `ids` is contiguous.
void add_bucket(Commands& commands, const at::Tensor& ids, int64_t num_experts, const Buckets& out,
                const std::optional<BucketTiles>& tiles = std::nullopt);

}  // namespace moe_mps
