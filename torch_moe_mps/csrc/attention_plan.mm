#include "attention_plan.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "../shaders/geometry.h"
#include "metal/function.h"

namespace moe_mps {
namespace {

constexpr int64_t kSimdgroupsAtFullRate = 24;  // of a core
constexpr int64_t kMemoryOfCore = 60 * 1024;   // threadgroup memory, by metal-benchmarks
constexpr int64_t kFewKeys = 256;              // fewer are not split: merging would take as long
constexpr int64_t kKeysOfSimdgroup = 16;
constexpr int64_t kMergedKeys = 32;         // take as long as writing and merging the sums of a chunk
constexpr int64_t kQueryBytes = 20 * 1024;  // for queries; what a block shares takes up to 10 KiB

// A kernel of attention.metal: the widest value head, the queries and the simdgroups of a block, the bytes
// in which an element of a query is staged, and the threadgroup memory that the kernel declares.
struct Kernel {
  int64_t value_width, queries, simdgroups, element, shared;
  int64_t step = simdgroups * kKeysOfSimdgroup;  // keys that a threadgroup takes at once
};
constexpr int64_t kFewQueries = 8;
constexpr Kernel kFew[] = {
    {64, 8, 4, 4, 6432}, {128, 8, 4, 4, 4384}, {256, 8, 4, 4, 2336}, {512, 8, 8, 4, 4672}};
constexpr Kernel kMore[] = {
    {64, 16, 4, 4, 4640}, {128, 16, 4, 4, 4640}, {256, 16, 8, 4, 9280}, {512, 16, 8, 2, 9280}};
// For prompts: keys and values are read half as often. By the cost model, 2,048 tokens of 32 heads of 128
// read for 2.0 ms in place of 4.0 (M4 Max, no cache between threadgroups) and issue for 3.1 in place of 2.9.
constexpr Kernel kMost[] = {{64, 32, 4, 2, 5136}, {128, 32, 8, 2, 10272}};

// Those of tiles.metal.
constexpr Kernel kFewTiled[] = {
    {64, 8, 4, 4, 4416, 128}, {128, 8, 4, 4, 4416, 128}, {256, 8, 4, 4, 2336}, {512, 8, 8, 4, 4672}};
constexpr Kernel kMoreTiled[] = {{64, 16, 4, 4, 4640}, {128, 16, 4, 4, 4640}, {256, 16, 8, 4, 9280}};

int64_t query_bytes(const AttentionShape& shape, const Kernel& kernel) {
  return kernel.queries * ceil_div(shape.width, kQueryColumns) * kQueryColumns * kernel.element;
}

// With values over 256, there is a kernel of 16 queries only for a token without a mask, in 16 bits. Where it
// has no more queries to fill up than blocks of 8, it reads latents half as often: 39.0 us of issue in place
// of 43.9 by the cost model (M1 Max, 128 heads, 1,024 keys).
bool has_more_queries(const AttentionShape& shape, const Kernel& more) {
  if (shape.queries() <= kFewQueries || query_bytes(shape, more) > kQueryBytes) return false;
  if (more.element == sizeof(float)) return true;
  return shape.is_plain && shape.tokens == 1 && !shape.selects() &&
         ceil_div(shape.queries(), kFewQueries) % 2 == 0;
}

// Whether a file has kernels for values of up to so many elements, or narrower ones take wider kernels: one
// family has a tail, DeepSeek-V4 with heads of 512.
bool has_width(std::string_view file, int64_t width) {
  return file != "attention_tailed" || width == 512;
}

// Threadgroups that a core runs at once.
int64_t groups_of_core(const AttentionShape& shape, const Kernel& kernel) {
  const int64_t memory = query_bytes(shape, kernel) + kernel.shared;
  return std::min(kSimdgroupsAtFullRate / kernel.simdgroups, kMemoryOfCore / memory);
}

int64_t blocks_of(const AttentionShape& shape, const Kernel& kernel) {
  return ceil_div(shape.queries(), kernel.queries) * shape.parts();
}

// Whether blocks of the most queries fill the GPU, so that no keys are split.
bool has_most_queries(const AttentionShape& shape, const Kernel& most, int64_t cores) {
  return shape.is_plain && !shape.selects() && query_bytes(shape, most) <= kQueryBytes &&
         shape.batch * shape.key_heads * blocks_of(shape, most) >= cores * groups_of_core(shape, most);
}

const Kernel& kernel_for(const AttentionShape& shape, int64_t cores) {
  size_t i = 0;
  while (i + 1 < std::size(kFew) &&
         (shape.value_width > kFew[i].value_width || !has_width(shape.file, kFew[i].value_width)))
    ++i;
  if (shape.is_tiled()) {
    const bool has_more = i < std::size(kMoreTiled) && has_more_queries(shape, kMoreTiled[i]);
    return has_more ? kMoreTiled[i] : kFewTiled[i];
  }
  if (i < std::size(kMost) && has_most_queries(shape, kMost[i], cores)) return kMost[i];
  return has_more_queries(shape, kMore[i]) ? kMore[i] : kFew[i];
}

// Keys of a chunk, in whole tiles: about a share of `chunks`, with the least work for the busiest core. By
// the cost model, 64 heads of 64 over 8,192 keys take at most 26 us instead of 32 on an M4 Max, and 38
// instead of 46 on an M1 Max.
int64_t balanced_chunk(int64_t keys, int64_t chunks, int64_t tile, int64_t groups, int64_t cores) {
  const int64_t more = ceil_div(ceil_div(keys, chunks), tile) * tile, fewer = more - tile;
  const auto busiest = [&](int64_t chunk) {
    return ceil_div(ceil_div(keys, chunk) * groups, cores) * (chunk + kMergedKeys);
  };
  return fewer > 0 && busiest(fewer) < busiest(more) ? fewer : more;
}

}  // namespace

int64_t AttentionShape::queries() const {
  const int64_t of_part = selects() ? 1 : is_tiled() ? std::min(tokens, kTileTokens) : tokens;
  return group_heads() * of_part;
}

int64_t AttentionShape::parts() const {
  if (is_tiled()) return (position + tokens - 1) / kTileTokens - position / kTileTokens + 1;
  return selects() ? tokens : 1;
}

AttentionPlan plan_attention(const AttentionShape& shape, int64_t cores) {
  const Kernel& kernel = kernel_for(shape, cores);
  const int64_t blocks = blocks_of(shape, kernel), groups = shape.batch * shape.key_heads * blocks;

  AttentionPlan plan;
  const int64_t most = shape.keys < kFewKeys ? 1 : ceil_div(shape.keys, kernel.step);
  plan.memory = query_bytes(shape, kernel);
  const int64_t wanted = cores * groups_of_core(shape, kernel);
  const int64_t chunks = std::min(most, ceil_div(wanted, groups));
  plan.chunk = chunks == 1 ? shape.keys : balanced_chunk(shape.keys, chunks, kernel.step, groups, cores);
  plan.chunks = std::max<int64_t>(1, ceil_div(shape.keys, plan.chunk));
  plan.kernel = c10::str(shape.file, kernel.queries, "_", kernel.value_width);
  plan.width = kernel.value_width;
  plan.grid = {plan.chunks, blocks, shape.batch * shape.key_heads};
  plan.threads = kernel.simdgroups * kSimdWidth;
  plan.merge_grid = {shape.batch * shape.tokens * shape.heads,
                     ceil_div(shape.value_width, kMergeColumns * kSimdWidth)};
  return plan;
}

Library attention_library(const char* file, int64_t width, c10::ScalarType dtype, bool quantized) {
  Library library{file, dtype};
  if (quantized) {
    library.weights = "affine8";
    library.weights_type = "QuantizedCache<MOE_DTYPE>";
    library.weights_header = "attention/quantized_cache";
  }
  library.width = width;
  return library;
}

Library tiles_library(int64_t width, c10::ScalarType dtype, int64_t k_bits, int64_t v_bits) {
  Library library{"tiles", dtype};
  library.weights = k_bits == 4 ? (v_bits == 4 ? "k4v4" : "k4v2") : (v_bits == 4 ? "k2v4" : "k2v2");
  library.weights_type = k_bits == 4 ? (v_bits == 4 ? "TileBits<4, 4>" : "TileBits<4, 2>")
                                     : (v_bits == 4 ? "TileBits<2, 4>" : "TileBits<2, 2>");
  library.width = width;
  return library;
}

std::vector<Library> attention_libraries(c10::ScalarType dtype) {
  std::vector<Library> all;
  for (const auto& [file, has_quantized] : {std::pair("attention", true),
                                            {"attention_turned", false},
                                            {"attention_selected", true},
                                            {"attention_tailed", false}}) {
    for (const bool quantized : {false, true}) {
      for (const Kernel& kernel : kFew) {
        if (quantized && !has_quantized) continue;
        if (has_width(file, kernel.value_width))
          all.push_back(attention_library(file, kernel.value_width, dtype, quantized));
      }
    }
  }
  for (const Kernel& kernel : kFewTiled) {
    for (const int64_t k_bits : {4, 2}) {
      for (const int64_t v_bits : {4, 2})
        all.push_back(tiles_library(kernel.value_width, dtype, k_bits, v_bits));
    }
  }
  return all;
}

namespace {

std::string plan_line(int64_t batch, int64_t tokens, int64_t heads, int64_t key_heads, int64_t keys,
                      int64_t width, int64_t value_width, int64_t cores, bool selects, bool is_plain) {
  const AttentionPlan plan = plan_attention({batch, tokens, heads, key_heads, keys, width, value_width,
                                             selects ? "attention_selected" : "attention", is_plain},
                                            cores);
  const Size& grid = plan.grid;
  return c10::str(plan.kernel, " grid ", grid.x, "x", grid.y, "x", grid.z, " of ", plan.threads, " with ",
                  plan.memory, " bytes, ", plan.chunk, " keys each");
}

}  // namespace
}  // namespace moe_mps

MOE_FUNCTION("_plan_attention(int batch, int tokens, int heads, int key_heads, int keys, int width, "
             "int value_width, int cores=16, bool selects=False, bool is_plain=False) -> str",
             plan_line)
