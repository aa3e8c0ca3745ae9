// Low-rank adapters
#pragma once

// Pair p = token * slots + slot. Without ids every pair is of the one adapter, and a pair is a token.
struct LoraParams {
  uint32_t pairs;
  uint32_t slots;
  uint32_t experts;
  uint32_t rank;
  uint32_t inputs;      // columns of A
  uint32_t outputs;     // rows of B
  uint32_t tile_pairs;  // of a threadgroup
  uint32_t columns;     // of a threadgroup
  uint32_t has_ids;
  uint32_t wide_ids;      // ids are int64
  uint32_t listed;        // pairs come in the order of a list
  uint32_t x_per_pair;    // x has a row for each pair, else for each token
  uint32_t factor_dtype;  // of both factors
  uint32_t b_row;         // strides of B
  uint32_t b_column;
  float scaling;
};
