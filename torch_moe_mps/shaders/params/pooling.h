#pragma once

// pool_windows. Strides are in elements; the state is contiguous.
struct PoolParams {
  TokenStrides kv;
  TokenStrides gate;
  TokenStrides entries;  // whose tokens are entries
  uint32_t tokens;
  uint32_t position;  // tokens before the new ones
  uint32_t rate;      // tokens of a window
  uint32_t parts;     // of a window's tokens, for each of which there are threads
  uint32_t rows;      // tokens of the state
  uint32_t columns;   // of a token: those of an entry, or twice as many if windows overlap
  uint32_t width;     // of an entry
  uint32_t turning;   // pairs of an entry
  uint32_t freq_dtype;
  uint32_t bias_dtype;
  uint32_t weight_dtype;
  float scaling;
  float eps;
};
