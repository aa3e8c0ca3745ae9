// Sorting pairs by expert, as the experts' matmuls use it.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "encoder.h"

namespace moe_mps {

// Tiles of at most `tile_rows` pairs of one expert, and the grids of two matmuls over them.
struct TileList {
  at::Tensor tiles;  // int32 [max_tiles, 4]: expert, first position in pair_order, count, 0; ascending
  at::Tensor
      grids;  // int32 [6]: columns_a, tiles, 1, columns_b, tiles, 1; without any tile one tile of count 0
  int64_t tile_rows;
  int64_t columns_a;
  int64_t columns_b;
  bool sentinel_tiles;  // behind the others, tiles of expert -1 for the pairs without an expert
};

// The most experts whose counters fit into threadgroup memory; what moe_bucket promises.
constexpr int64_t kMaxBuckets = 1024;

// The most tiles that `pairs` pairs can make.
int64_t max_tiles(int64_t pairs, int64_t num_experts, int64_t tile_rows);

// Appends the dispatch of moe_bucket: pair_order int32 [pairs], offsets int32 [num_experts + 1]. `ids` is
// contiguous, not empty.
void add_bucket(Commands& commands, const at::Tensor& ids, int64_t num_experts, const at::Tensor& pair_order,
                const at::Tensor& offsets, const std::optional<TileList>& tiles = std::nullopt);

}  // namespace moe_mps
