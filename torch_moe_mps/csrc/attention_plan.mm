#include "attention_plan.h"

#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>

#include "../shaders/geometry.h"

namespace moe_mps {
namespace {

constexpr int64_t kSimdgroupsOfCore = 24;  // for its full rate
constexpr int64_t kFewKeys = 256;          // fewer are not split: merging would take as long
constexpr int64_t kKeysOfSimdgroup = 16;
constexpr int64_t kQueryBytes = 20 * 1024;  // of threadgroup memory; what a block shares takes up to 10 KiB

// attention.metal: the widest value head of a kernel, the queries of its larger block, and the simdgroups of
// its blocks of few and of more queries.
struct Kernel {
  int64_t value_width, queries, few_simdgroups, simdgroups;
};
constexpr int64_t kFewQueries = 8;
constexpr Kernel kKernels[] = {{64, 16, 4, 4}, {128, 16, 4, 4}, {256, 16, 4, 8}, {512, 8, 8, 8}};

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape, int64_t cores) {
  const Kernel& kernel = *std::find_if(std::begin(kKernels), std::end(kKernels) - 1,
                                       [&](const Kernel& k) { return shape.value_width <= k.value_width; });
  const int64_t query_bytes = ceil_div(shape.width, kQueryColumns) * kQueryColumns * int64_t(sizeof(float));
  const bool few = shape.queries() <= kFewQueries || kernel.queries * query_bytes > kQueryBytes;
  const int64_t queries = few ? kFewQueries : kernel.queries;
  const int64_t simdgroups = few ? kernel.few_simdgroups : kernel.simdgroups;
  const int64_t tile = simdgroups * kKeysOfSimdgroup;
  const int64_t blocks = ceil_div(shape.queries(), queries) * (shape.selects ? shape.tokens : 1),
                groups = shape.batch * shape.key_heads * blocks;

  AttentionPlan plan;
  const int64_t most = shape.keys < kFewKeys ? 1 : ceil_div(shape.keys, tile);
  const int64_t wanted = cores * kSimdgroupsOfCore / simdgroups;
  const int64_t chunks = std::min(most, ceil_div(wanted, groups));
  plan.chunk = chunks == 1 ? shape.keys : ceil_div(ceil_div(shape.keys, chunks), tile) * tile;
  plan.chunks = std::max<int64_t>(1, ceil_div(shape.keys, plan.chunk));
  plan.kernel = std::string(shape.selects ? "attention_selected" : "attention") + std::to_string(queries) +
                "_" + std::to_string(kernel.value_width);
  plan.grid = {NSUInteger(plan.chunks), NSUInteger(blocks), NSUInteger(shape.batch * shape.key_heads)};
  plan.threads = simdgroups * kSimdWidth;
  plan.memory = queries * query_bytes;
  plan.merge_grid = {NSUInteger(shape.batch * shape.tokens * shape.heads),
                     NSUInteger(ceil_div(shape.value_width, kMergeColumns * kSimdWidth))};
  return plan;
}

namespace {

std::string plan_line(int64_t batch, int64_t tokens, int64_t heads, int64_t key_heads, int64_t keys,
                      int64_t width, int64_t value_width, int64_t cores, bool selects) {
  const AttentionPlan plan =
      plan_attention({batch, tokens, heads, key_heads, keys, width, value_width, selects}, cores);
  const Size& grid = plan.grid;
  return c10::str(plan.kernel, " grid ", grid.x, "x", grid.y, "x", grid.z, " of ", plan.threads, " with ",
                  plan.memory, " bytes, ", plan.chunk, " keys each");
}

}  // namespace
}  // namespace moe_mps

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.def("_plan_attention(int batch, int tokens, int heads, int key_heads, int keys, int width, "
        "int value_width, int cores=16, bool selects=False) -> str",
        &moe_mps::plan_line);
}
