#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>

#include "../shaders/geometry.h"
#include "../shaders/params.h"
#include "attention.h"
#include "attention_plan.h"
#include "gpu.h"
#include "metal/function.h"
#include "metal/work.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr int64_t kTileAlignment = 4;  // words of the widest vector that a kernel loads

// Tiles of heads of so many elements, in words.
TileParams tile_params(const Tensor& tiles, int64_t width, int64_t bits, bool has_factors) {
  TileParams params{};
  params.tiles = head_strides(tiles);
  params.width = width;
  params.numbers = kTileTokens * width * bits / 32;
  params.has_factors = has_factors;
  return params;
}

Tensor readable_tiles(const Tensor& tiles) {
  const Tensor rows = rows_contiguous(tiles);
  return starts_aligned(rows, kTileAlignment) ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

void _seal_tiles_(const Tensor& states_, const Tensor& tiles_, int64_t start, int64_t bits, bool factors) {
  if (states_.numel() == 0) return;
  const Tensor states = rows_contiguous(states_), tiles = rows_contiguous(tiles_);
  SealParams params{};
  params.states = head_strides(states);
  params.tiles = tile_params(tiles, states.size(3), bits, factors);
  params.start = start;
  Commands commands;
  commands.add({"tiles_seal", states.scalar_type()}, bits == 4 ? "seal_tiles_4" : "seal_tiles_2")
      .bind_strided(states, tiles)
      .params(params)
      .threadgroups({states.size(2) / kTileTokens, states.size(1), states.size(0)}, {kSealThreads});
  commands.encode();
  if (!tiles.is_same(tiles_)) tiles_.copy_(tiles);
}

Tensor _tiled_attention(const Tensor& q_, const Tensor& k_dense, const Tensor& v_dense,
                        const Tensor& k_tiles_, const OptionalTensor& v_tiles_, int64_t k_bits,
                        int64_t v_bits, int64_t position, double scale, const OptionalTensor& mask_,
                        const OptionalTensor& key_range_, const Softmax& softmax, const Gate& gate_,
                        std::optional<std::string_view> dtype) {
  const int64_t batch = q_.size(0), heads = q_.size(1), tokens = q_.size(2), keys = position + tokens;
  const int64_t key_heads = k_dense.size(1), width = k_dense.size(3), value_width = v_dense.size(3);
  const Tensor output = at::empty({batch, tokens, heads, value_width},
                                  q_.options().dtype(dtype ? dtype_named(*dtype) : q_.scalar_type()));
  if (output.numel() == 0) return output;
  const Tensor q = rows_contiguous(q_), k_tiles = readable_tiles(k_tiles_);
  const Tensor v_tiles = v_tiles_ ? readable_tiles(*v_tiles_) : k_tiles;
  const OptionalTensor mask = readable_mask(mask_), gate = rows_contiguous(gate_.factors);
  const OptionalTensor key_range = contiguous(key_range_), sinks = contiguous(softmax.sinks);

  const AttentionShape shape{batch, tokens,      heads,   key_heads, keys,
                             width, value_width, "tiles", false,     position};
  const AttentionPlan plan = plan_attention(shape, gpu_cores());
  TiledParams params{};
  AttentionParams& all = params.attention;
  const Tensor k = readable_rows(k_dense, 1, all.k), v = readable_rows(v_dense, 1, all.v);
  all.q = head_strides(q);
  all.tokens = tokens;
  all.heads = heads;
  all.key_heads = key_heads;
  all.keys = keys;
  all.position = position;
  all.rows = batch * tokens * heads;
  all.chunk = plan.chunk;
  all.chunks = plan.chunks;
  all.output_is_float = output.scalar_type() == at::kFloat;
  all.has_key_range = key_range.has_value();
  set_mask(all, mask, std::nullopt, 0);
  set_gate(all, gate, gate_.is_softplus);
  set_softmax(all, sinks, softmax.softcap, scale);
  params.k = tile_params(k_tiles, width, k_bits, false);
  params.v = v_tiles_ ? tile_params(v_tiles, value_width, v_bits, true) : params.k;
  params.left_out = keys - k.size(2);
  params.tile_blocks = plan.grid.y / shape.parts();

  const OptionalTensor partials = partials_of(plan, all, q);
  const double issue_cycles = kIssueCyclesOfAttention * static_cast<double>(batch * heads * tokens) *
                              (keys - 0.5 * (tokens - 1)) * static_cast<double>(width + value_width);
  const int64_t at_once = ceil_div(plan.grid.y * tokens_at_once(tokens, issue_cycles), tokens);
  const bool has_tiles = k_tiles.numel() > 0;
  for (int64_t first = 0; first < plan.grid.y; first += at_once) {
    const int64_t blocks = std::min(at_once, plan.grid.y - first);
    const double part = static_cast<double>(blocks) / static_cast<double>(plan.grid.y);
    params.first_block = first;
    Commands commands;
    commands.add(tiles_library(plan.width, q.scalar_type(), k_bits, v_bits), plan.kernel, output)
        .bind_strided(q, k, v, has_tiles ? k_tiles : output, has_tiles ? v_tiles : output, mask)
        .bind(sinks, output, partials)
        .bind_strided(key_range, gate)
        .params(params)
        .work(part * issue_cycles, part * static_cast<double>(k_tiles.nbytes() + v_tiles.nbytes()))
        .threadgroup_memory(plan.memory)
        .threadgroups({plan.grid.x, blocks, plan.grid.z}, {plan.threads});
    if (partials && first + blocks == plan.grid.y)
      add_merge(commands, q.scalar_type(), plan, all, *partials, sinks, gate, output);
    commands.encode();
  }
  return output;
}

}  // namespace

MOE_OPERATOR(_seal_tiles_)
MOE_OPERATOR(_tiled_attention)

}  // namespace moe_mps
