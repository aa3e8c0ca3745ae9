// How attention runs: a pure function from shapes and the GPU's cores to dispatches. Tests and benchmarks
// call it as `torch.ops.moe_mps._plan_attention`.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "metal/encoder.h"

namespace moe_mps {

struct AttentionShape {
  int64_t batch, tokens, heads, key_heads;
  int64_t keys;  // keys that any token may see
  int64_t width, value_width;
  std::string_view file = "attention";  // has the kernels
  bool may_be_wide = false;  // there is a kernel for 16 queries of values over 256: dense, 16 bits, no mask
  // Each token has keys of its own.
  bool selects() const { return file == "attention_selected" || file == "attention_tailed"; }
  int64_t group_heads() const { return heads / key_heads; }
  // Queries of a key head that one block may take.
  int64_t queries() const { return selects() ? group_heads() : group_heads() * tokens; }
};

struct AttentionPlan {
  std::string kernel;  // without the suffix of its library
  Size grid{0};
  int64_t threads = 0;
  int64_t memory = 0;  // bytes of threadgroup memory
  int64_t chunk = 0;   // keys of a threadgroup
  int64_t chunks = 0;  // more than 1: attention_merge follows
  Size merge_grid{0};
};

AttentionPlan plan_attention(const AttentionShape& shape, int64_t cores);

}  // namespace moe_mps
