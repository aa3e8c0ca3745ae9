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

// Strides of [B, T, heads, ...] or of a cache's [B, heads, T, ...], in elements; those of a head's elements
// are 1.
struct TokenStrides {
  uint64_t batch;
  uint64_t token;
  uint64_t head;
};
