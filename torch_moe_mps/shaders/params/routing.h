// Routing
#pragma once

#define SCORING_SOFTMAX 0
#define SCORING_SIGMOID 1
#define SCORING_SQRTSOFTPLUS 2
#define SCORING_SOFTMAX_AFTER_TOPK 3

struct RouterParams {
  uint32_t rows;
  uint32_t experts;
  uint32_t top_k;
  uint32_t vectorised;
  uint32_t wide_logits;  // float32; read by kernels of other dtypes
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
  uint32_t normalise_scaled;
  float masked_score;
  float sum_eps;
  float sum_min;
  float scaling_factor;
};

struct RouterLogitsParams {
  uint32_t tokens;
  uint32_t experts;
  uint32_t width;
  uint32_t vectorised;
  uint32_t hidden_dtype;
  uint32_t norm_dtype;
  uint32_t has_bias;
  uint32_t bias_dtype;
  uint32_t logits_dtype;
  float factor;
  float eps;
  float norm_weight_offset;
};
