// Rotary position embedding
#pragma once

#define PAIRS_HALF 0                 // elements i and i + R / 2
#define PAIRS_INTERLEAVED 1          // elements 2 i and 2 i + 1
#define PAIRS_INTERLEAVED_TO_HALF 2  // read as interleaved, stored as halves

// q, k or v.
struct RopeHeads {
  TokenStrides input;
  TokenStrides output;
  uint32_t heads;
  uint32_t width;
  uint32_t rotary;  // elements that turn
  uint32_t is_normed;
  uint32_t has_weight;
  uint32_t weight_dtype;
  float norm_factor;
};

struct RopeParams {
  RopeHeads q;
  RopeHeads k;
  RopeHeads v;
  uint64_t table_batch_stride;
  uint64_t table_token_stride;
  uint32_t rows;  // heads of all tokens
  uint32_t tokens;
  uint32_t rotary_last;
  uint32_t pairs;
  uint32_t table_of_pairs;  // cos and sin have an element for each pair
  uint32_t table_dtype;
  uint32_t vectorised;
  float eps;
  float weight_offset;
};
