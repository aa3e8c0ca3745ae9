// Parameters are plain structs that the host fills and the shader reads: params/ has a file for each family,
// this one what several share.
#pragma once
#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

// The dtypes of small tensors (weights of norms, routing weights, biases): kernels branch on them.
#define DTYPE_FLOAT 0
#define DTYPE_HALF 1
#define DTYPE_BFLOAT 2

// Strides of [B, T, heads, ...], in elements; those of a head's elements are 1.
struct TokenStrides {
  uint64_t batch;
  uint64_t token;
  uint64_t head;
};

// The weighted sum over a token's slots, and what is added to it.
struct ExpertSumParams {
  uint32_t weights_dtype;
  uint32_t gate_dtype;
  uint32_t has_gate;
  uint32_t gate_is_logit;
  uint32_t has_shared;
  uint32_t has_residual;
};

// The strides of a cache, in elements.
struct CacheRows {
  uint64_t batch_stride;
  uint64_t head_stride;
  uint64_t key_stride;
};
