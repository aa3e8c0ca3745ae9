#pragma once

// Hyper-connections. Rows of streams are contiguous.
struct HyperParams {
  uint32_t tokens;
  uint32_t streams;
  uint32_t width;   // of a stream
  uint32_t rows;    // of fn
  uint32_t slices;  // threadgroups that share the columns of a token
  uint32_t has_out;
  uint32_t has_comb;
  uint32_t fn_dtype;
  uint32_t base_dtype;
  uint32_t scale_dtype;
  uint32_t iterations;
  float norm_eps;
  float eps;
  float post_factor;
  float post_eps;
};
