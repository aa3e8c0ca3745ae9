// Linear attention by the gated delta rule
#pragma once

#define DECAY_LOG 0
#define DECAY_SOFTPLUS 1
#define DECAY_SIGMOID 2
#define DECAY_TIMES_BETA 3

#define BETA_NONE 0
#define BETA_SIGMOID 1
#define BETA_SOFTPLUS 2

// Strides are in elements.
struct GatedDeltaRuleParams {
  TokenStrides q;
  TokenStrides k;
  TokenStrides v;
  TokenStrides g;
  TokenStrides beta;
  TokenStrides gate;
  uint64_t state_batch_stride;
  uint64_t state_head_stride;
  uint64_t state_row_stride;
  uint64_t state_column_stride;
  uint32_t tokens;
  uint32_t key_heads;
  uint32_t heads;  // value heads
  uint32_t key_width;
  uint32_t value_width;
  uint32_t decay;
  uint32_t g_dtype;
  uint32_t beta_activation;
  uint32_t beta_dtype;
  uint32_t has_a_log;
  uint32_t a_log_dtype;
  uint32_t has_dt_bias;
  uint32_t dt_bias_dtype;
  uint32_t has_l2norm;
  uint32_t has_skip;
  uint32_t skip_dtype;
  uint32_t has_norm;  // of the result, with a gate
  uint32_t norm_dtype;
  uint32_t gate_is_sigmoid;
  uint32_t pending;  // tokens that a row has room for; 0 without any
  uint32_t keep;
  float l2norm_eps;
  float scale;
  float lower_bound;
  float beta_min;
  float norm_eps;
  float norm_weight_offset;
};
