// Writing caches of 8 bits
#pragma once

// Strides are in elements.
struct CacheWriteParams {
  CacheRows packed;
  CacheRows groups;  // scales and biases
  uint64_t batch_stride;
  uint64_t head_stride;
  uint64_t token_stride;
  uint32_t threads;
  uint32_t words;  // of a head
  uint32_t group_words;
  uint32_t tokens;
  uint32_t heads;
  uint32_t start;  // of the new tokens
};
