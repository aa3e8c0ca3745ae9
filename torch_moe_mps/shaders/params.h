// The parameters of every kernel, as plain structs that the host fills and the shader reads.
#pragma once
#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

// Dtypes that a kernel tells apart at run time (small tensors: weights of norms, routing weights, biases).
#define DTYPE_FLOAT 0
#define DTYPE_HALF 1
#define DTYPE_BFLOAT 2

// Norms

#define SCALAR_NONE 0
#define SCALAR_SINGLE 1
#define SCALAR_PER_COLUMN 2

struct NormParams {
  uint32_t rows;
  uint32_t width;
  uint32_t simdgroups_per_row;
  uint32_t vectorised;  // every row starts on a multiple of 4 elements
  uint32_t weight_dtype;
  uint32_t scalar_kind;
  uint32_t scalar_dtype;
  uint32_t write_sum;
  float eps;
  float weight_offset;
};

// Combine

struct SiluMulParams {
  uint64_t count;
  uint32_t vectorised;
};

struct WeightedSumParams {
  uint32_t rows;
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t weights_dtype;
  uint32_t has_shared;
  uint32_t has_gate;
  uint32_t gate_dtype;
  uint32_t gate_is_logit;
  uint32_t has_residual;
};

struct WeightedSumNormParams {
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t weights_dtype;
  uint32_t norm_dtype;
  float eps;
};

// Routing

#define SCORING_SOFTMAX 0
#define SCORING_SIGMOID 1
#define SCORING_SQRTSOFTPLUS 2
#define SCORING_SOFTMAX_AFTER_TOPK 3

struct RouterParams {
  uint32_t rows;
  uint32_t experts;
  uint32_t top_k;
  uint32_t vectorised;
  uint32_t scoring;
  uint32_t has_bias;
  uint32_t bias_dtype;
  uint32_t bias_on_logits;
  uint32_t groups;
  uint32_t top_groups;
  uint32_t group_score_is_max;
  uint32_t has_masked_score;
  uint32_t normalise;
  uint32_t has_scale;
  uint32_t scale_dtype;
  float masked_score;
  float norm_eps;
  float norm_min;
  float scaling_factor;
};

struct GateParams {
  uint32_t tokens;
  uint32_t experts;
  uint32_t width;
  uint32_t top_k;
  uint32_t tile_width;  // columns of hidden that are staged at a time
  uint32_t vectorised;
  uint32_t router_dtype;
  uint32_t norm_dtype;
  uint32_t scale_dtype;
  uint32_t renormalise;
  float eps;
};

struct BucketParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t expert_bits;  // binary digits of `experts`, the sentinels' bucket
  uint32_t tile_rows;    // 0: no tile list
  uint32_t columns_a;
  uint32_t columns_b;
};

struct IdsTpeParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t gate_up_tiles;
  uint32_t down_tiles;
};
