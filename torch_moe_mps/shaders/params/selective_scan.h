// Mamba-1's selective scan
#pragma once

// Strides are in elements. A channel is a head of one element here.
struct SelectiveScanParams {
  TokenStrides x;
  TokenStrides step;
  TokenStrides gate;
  TokenStrides b;  // the last one is that of a channel's states
  TokenStrides c;
  TokenStrides state;  // of rows, channels and their states
  uint32_t tokens;
  uint32_t channels;
  uint32_t states;  // of a channel
  uint32_t a_log_dtype;
  uint32_t has_dt_bias;
  uint32_t dt_bias_dtype;
  uint32_t has_skip;
  uint32_t skip_dtype;
  uint32_t has_gate;
  uint32_t pending;  // tokens that a row has room for; 0 without any
  uint32_t keep;
};
