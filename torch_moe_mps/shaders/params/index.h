#pragma once

// index_scores and index_select. Strides are in elements; those of scores and indices are of whole rows.
struct IndexParams {
  TokenStrides q;
  TokenStrides k;
  TokenStrides weights;
  uint32_t tokens;
  uint32_t first_token;  // of those whose scores are in memory
  uint32_t tokens_at_once;
  uint32_t heads;
  uint32_t groups;  // of heads that choose together
  uint32_t width;
  uint32_t keys;
  uint32_t rows;  // of scores: blocks of keys
  uint32_t block;
  uint32_t is_pooled;  // k has a row for each complete block, else for each key
  uint32_t tail;
  uint32_t chosen;
  uint32_t slots;  // of a result: indices, or words of bits
  uint32_t as_bits;
  uint32_t has_weights;
  uint32_t weights_dtype;
  uint32_t has_key_range;
  uint32_t vectorised;  // keys are read 4 elements at a time
  float scale;
};
