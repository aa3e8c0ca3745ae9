// Causal depthwise convolution with a state
#pragma once

// Strides are in elements.
struct ConvParams {
  TokenStrides x;  // of rows, tokens and channels
  uint32_t channels;
  uint32_t tokens;
  uint32_t length;  // positions that the state holds
  uint32_t width;   // positions that the convolution sees
  uint32_t thread_results;
  uint32_t silu;
  uint32_t add_input;
  uint32_t state_dtype;
  uint32_t weight_dtype;
  uint32_t has_bias;
  uint32_t bias_dtype;
  uint32_t pending;  // tokens that a row has room for; 0 without any
  uint32_t keep;
};
