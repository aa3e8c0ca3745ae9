// How attention runs: a pure function from shapes and the GPU's cores to dispatches. Tests and benchmarks
// call it as `torch.ops.moe_mps._plan_attention`.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "metal/encoder.h"
#include "metal/library.h"

namespace moe_mps {

struct AttentionShape {
  int64_t batch, tokens, heads, key_heads;
  int64_t keys;  // keys that any token may see
  int64_t width, value_width;
  const char* file = "attention";  // has the kernels
  bool is_plain = false;  // a dense cache of 16 bits, without a mask: there are kernels of more queries
  int64_t position = 0;   // of the first token, for "tiles"
  // Each token has keys of its own.
  bool selects() const {
    const std::string_view name = file;
    return name == "attention_selected" || name == "attention_tailed";
  }
  // A cache of tiles: the tokens of a tile see the same keys in codes.
  bool is_tiled() const { return std::string_view(file) == "tiles"; }
  int64_t group_heads() const { return heads / key_heads; }
  // Queries of a key head that one block may take.
  int64_t queries() const;
  // Parts of the tokens that have blocks of their own.
  int64_t parts() const;
};

struct AttentionPlan {
  std::string kernel;  // without the suffix of its library
  int64_t width = 0;   // of its library
  Size grid{0};
  int64_t threads = 0;
  int64_t memory = 0;  // bytes of threadgroup memory
  int64_t chunk = 0;   // keys of a threadgroup
  int64_t chunks = 0;  // more than 1: attention_merge follows
  Size merge_grid{0};
};

AttentionPlan plan_attention(const AttentionShape& shape, int64_t cores);

// shaders/<file>.metal for values of up to `width` elements, of keys and values in `dtype` or in 8 bits.
Library attention_library(const char* file, int64_t width, c10::ScalarType dtype, bool quantized);

// shaders/tiles.metal for values of up to `width` elements, and keys and values of so many bits.
Library tiles_library(int64_t width, c10::ScalarType dtype, int64_t k_bits, int64_t v_bits);

// All of them.
std::vector<Library> attention_libraries(c10::ScalarType dtype);

}  // namespace moe_mps
