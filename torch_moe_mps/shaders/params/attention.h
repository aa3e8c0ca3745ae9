// Attention
#pragma once

#define MASK_NONE 0  // causal
#define MASK_BOOL 1
#define MASK_ADDITIVE 2
#define MASK_BITS 3  // of words of 32 keys

// Keys or values. Strides are in elements, for quantised ones in words.
struct CacheParams {
  TokenStrides values;
  TokenStrides scales;  // and biases
  TokenStrides tail;
  uint32_t width;        // elements of a head
  uint32_t group_shift;  // elements of a group, as a power of two
  uint32_t vectorised;   // whole runs of elements lie side by side, from multiples of their size on
};

// Strides are in elements.
struct AttentionParams {
  CacheParams k;
  CacheParams v;
  TokenStrides q;
  uint64_t mask_batch_stride;
  uint64_t mask_head_stride;
  TokenStrides index;
  TokenStrides gate;
  uint32_t gate_width;        // elements of a head's gate: 1 for all of its values, 0 without one
  uint32_t gate_is_softplus;  // else sigmoid
  uint32_t output_is_float;   // else in the dtype of the queries
  uint32_t index_block;       // keys of an index; 0 without indices
  uint32_t indexed_keys;      // of the cache; `keys` are the slots of a token
  uint32_t tail_keys;
  uint32_t tail_slots;  // of a token: indices, or all
  uint32_t tail_rate;   // tokens of a key
  uint32_t position;    // tokens before the new ones
  uint32_t mask_token_stride;
  uint32_t mask_key_stride;
  uint32_t tokens;
  uint32_t heads;
  uint32_t key_heads;
  uint32_t keys;
  uint32_t first_key;      // the lowest key that any token sees
  int32_t first_position;  // the last key that the first token sees in order: S - T and its look-ahead
  uint32_t chunk;          // keys that a threadgroup takes
  uint32_t mask_kind;
  uint32_t mask_dtype;
  uint32_t window;  // keys that a token sees in order, its look-ahead included; 0: all
  uint32_t has_key_range;
  uint32_t has_sinks;
  uint32_t sinks_dtype;
  uint32_t rows;    // queries of all heads: B * T * Hq
  uint32_t chunks;  // more than 1: attention_merge adds up partial results
  float scale;
  float softcap;  // 0: none
};
