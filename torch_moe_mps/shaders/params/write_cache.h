// Writing caches of 8 bits
#pragma once

// Strides are in elements.
struct CacheWriteParams {
  TokenStrides states;
  TokenStrides packed;
  TokenStrides groups;  // scales and biases
  uint32_t threads;
  uint32_t words;  // of a head
  uint32_t group_words;
  uint32_t tokens;
  uint32_t heads;
  uint32_t start;  // of the new tokens
};
