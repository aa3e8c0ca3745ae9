// The parameters of every kernel, as plain structs that the host fills and the shader reads.
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

// Norms

#define SCALAR_NONE 0
#define SCALAR_SINGLE 1
#define SCALAR_PER_COLUMN 2
#define SCALAR_GATE 3  // a logit for each stream of a residual

struct NormParams {
  uint64_t input_stride;  // elements between the starts of two rows of the input
  uint64_t gate_stride;   // elements between the logits of two rows of the input
  uint32_t rows;
  uint32_t width;
  uint32_t simdgroups_per_row;
  uint32_t vectorised;  // every row starts on a multiple of 4 elements
  uint32_t has_weight;
  uint32_t weight_dtype;
  uint32_t scalar_kind;
  uint32_t scalar_dtype;
  uint32_t write_sum;
  uint32_t groups;  // rows, one behind the other, that have weights of their own
  uint32_t gate_is_sigmoid;
  uint32_t gate_first;
  uint32_t streams;  // rows of a residual to which one row of the input is added
  float eps;
  float weight_offset;
  float factor;  // of the norm alone, or of the input that is added to a residual
  float gate_factor;
};

// Rotary position embedding

#define PAIRS_HALF 0                 // elements i and i + R / 2
#define PAIRS_INTERLEAVED 1          // elements 2 i and 2 i + 1
#define PAIRS_INTERLEAVED_TO_HALF 2  // read as interleaved, stored as halves

// q, k or v. Strides are in elements.
struct RopeHeads {
  uint64_t batch_stride;
  uint64_t token_stride;
  uint64_t head_stride;
  uint64_t output_batch_stride;
  uint64_t output_token_stride;
  uint64_t output_head_stride;
  uint32_t heads;
  uint32_t width;
  uint32_t rotary;  // elements that turn
  uint32_t is_normed;
  uint32_t has_weight;
  uint32_t weight_dtype;
};

struct RopeParams {
  RopeHeads q;
  RopeHeads k;
  RopeHeads v;
  uint64_t table_batch_stride;
  uint64_t table_token_stride;
  uint32_t rows;  // heads of all tokens
  uint32_t tokens;
  uint32_t rotary_last;
  uint32_t pairs;
  uint32_t table_of_pairs;  // cos and sin have an element for each pair
  uint32_t table_dtype;
  uint32_t vectorised;
  float eps;
  float weight_offset;
};

#define TABLE_PAIRS 0        // a column for each pair
#define TABLE_HALVES 1       // the columns of all pairs, then the same again
#define TABLE_INTERLEAVED 2  // the column of each pair twice, side by side

struct RopeTableParams {
  uint64_t angles;  // how many the tokens have together
  uint32_t pairs;
  uint32_t axes;  // positions of a token, 0 where all pairs have one
  uint32_t layout;
  uint32_t wide_positions;  // positions are int64, else int32
  float scaling;
};

// Attention

#define MASK_NONE 0  // causal
#define MASK_BOOL 1
#define MASK_ADDITIVE 2
#define MASK_BITS 3  // of words of 32 keys

#define SINKS_NONE 0
#define SINKS_OF_HEADS 1
#define SINKS_OF_TOKENS 2

// Keys or values. Strides are in elements, for quantised ones in words.
struct CacheParams {
  uint64_t batch_stride;
  uint64_t head_stride;
  uint64_t scales_batch_stride;
  uint64_t scales_head_stride;
  uint32_t key_stride;
  uint32_t scales_key_stride;
  uint32_t width;        // elements of a head
  uint32_t group_shift;  // elements of a group, as a power of two
  uint32_t vectorised;   // whole runs of elements lie side by side, from multiples of their size on
};

// Strides of [B, T, heads, ...], in elements; those of a head's elements are 1.
struct TokenStrides {
  uint64_t batch;
  uint64_t token;
  uint64_t head;
};

// Strides are in elements.
struct AttentionParams {
  CacheParams k;
  CacheParams v;
  uint64_t q_batch_stride;
  uint64_t q_head_stride;
  uint64_t q_token_stride;
  uint64_t mask_batch_stride;
  uint64_t mask_head_stride;
  uint64_t index_batch_stride;
  uint64_t index_head_stride;
  uint64_t index_token_stride;
  TokenStrides gate;
  uint32_t gate_width;        // elements of a head's gate: 1 for all of its values, 0 without one
  uint32_t gate_is_softplus;  // else sigmoid
  uint32_t output_is_float;   // else in the dtype of the queries
  uint32_t index_block;       // keys of an index; 0 without indices
  uint32_t indexed_keys;      // of the cache; `keys` are the slots of a token
  uint32_t tail_keys;         // whose strides are in place of those of scales
  uint32_t tail_slots;        // of a token: indices, or all
  uint32_t tail_rate;         // tokens of a key
  uint32_t position;          // tokens before the new ones
  uint32_t relative_head_stride;
  uint32_t relative_extent;  // of a bias of relative positions, whose strides are in place of a mask's
  uint32_t mask_token_stride;
  uint32_t mask_key_stride;
  uint32_t tokens;
  uint32_t heads;
  uint32_t key_heads;
  uint32_t keys;
  uint32_t first_key;      // the lowest key that any token sees
  int32_t first_position;  // the last key that the first token sees in order: S - T and its look-ahead
  uint32_t chunk;          // keys that a threadgroup takes
  uint32_t mask_kind;
  uint32_t mask_dtype;
  uint32_t window;  // keys that a token sees in order, its look-ahead included; 0: all
  uint32_t has_key_range;
  uint32_t sinks;
  uint32_t sinks_dtype;
  uint32_t rows;    // queries of all heads: B * T * Hq
  uint32_t chunks;  // more than 1: attention_merge adds up partial results
  float scale;
  float softcap;  // 0: none
};

// The strides of a tensor of a cache that is written.
struct CacheRows {
  uint64_t batch_stride;
  uint64_t head_stride;
  uint64_t key_stride;
};

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

// Linear attention by the gated delta rule

// Strides are in elements.
struct ConvParams {
  TokenStrides x;  // of rows, tokens and channels
  uint32_t channels;
  uint32_t tokens;
  uint32_t length;  // positions that the state holds
  uint32_t width;   // positions that the convolution sees
  uint32_t thread_tokens;
  uint32_t silu;
  uint32_t add_input;
  uint32_t state_dtype;
  uint32_t weight_dtype;
  uint32_t has_bias;
  uint32_t bias_dtype;
};

#define DECAY_LOG 0
#define DECAY_SOFTPLUS 1
#define DECAY_SIGMOID 2
#define DECAY_TIMES_BETA 3

#define BETA_NONE 0
#define BETA_SIGMOID 1
#define BETA_SOFTPLUS 2

struct LinearAttentionParams {
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
  uint32_t has_beta;
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
  float l2norm_eps;
  float scale;
  float lower_bound;
  float beta_min;
  float norm_eps;
  float norm_offset;
};

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
};

// Combine

struct SiluMulParams {
  uint64_t count;
  uint32_t vectorised;
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

struct WeightedSumParams {
  ExpertSumParams sum;
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t in_place;  // the residual is in the output
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
  uint32_t normalise_scaled;
  float masked_score;
  float norm_eps;
  float norm_min;
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
  float eps;
  float norm_offset;
};

struct HashRouterParams {
  RouterLogitsParams logits;
  uint32_t table_rows;
  uint32_t top_k;
  uint32_t scoring;
  uint32_t normalise;
  uint32_t wide_table;  // int64, else int32
  uint32_t wide_tokens;
  float sum_eps;
  float scaling_factor;
};

struct BucketParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t chunks;          // runs of consecutive pairs, one a simdgroup
  uint32_t chunk;           // pairs of a run, a multiple of 32
  uint32_t upper_digits;    // binary digits of the number of experts above those that select a lane set
  uint32_t tile_pairs;      // 0: no tile list
  uint32_t sentinel_tiles;  // also tiles of expert -1 for the sentinels
  uint32_t columns_a;       // threadgroups across the columns of the two matmuls that use the tiles
  uint32_t columns_b;
};

struct IdsTpeParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t gate_up_tiles;
  uint32_t down_tiles;
};

// Experts

#define ACTIVATION_NONE 0
#define ACTIVATION_SILU 1
#define ACTIVATION_GELU 2
#define ACTIVATION_GELU_TANH 3
#define ACTIVATION_RELU 4
#define ACTIVATION_RELU2 5
#define ACTIVATION_SWIGLU_OAI 6
#define ACTIVATION_SILU_CLAMPED 7

// Of swiglu_oai where a call gives none; ops/_activations.py has them for the reference.
#define SWIGLU_OAI_ALPHA 1.702f
#define SWIGLU_OAI_LIMIT 7.0f

#define ROWS_PLAIN 0        // output i is weight row i
#define ROWS_HALVES 1       // gates in rows 0 .. I - 1, ups in rows I .. 2I - 1
#define ROWS_INTERLEAVED 2  // gate0, up0, gate1, up1, ...

// One matmul of experts. Pair p = token * slots + slot. Or of a linear layer, one matrix for all tokens: pair
// p is token p.
struct MatmulParams {
  uint32_t tokens;
  uint32_t slots;
  uint32_t pairs;
  uint32_t experts;
  uint32_t inputs;          // columns of an expert's matrix
  uint32_t rows;            // rows of an expert's matrix
  uint32_t outputs;         // what one pair has after the activation
  uint32_t vectorised;      // rows of x and of a dense matrix are whole vectors: multiples of 16 elements
  uint32_t has_ids;         // else every pair is of expert 0
  uint32_t wide_ids;        // ids are int64
  uint32_t x_per_pair;      // x has a row for each pair, else for each token
  uint32_t grid_by_expert;  // see pairs_of_grid_row in matmul/pairs.h
  uint32_t writes_tiles;    // the kernel writes the list of pairs by expert for the down projection
  uint32_t row_layout;
  uint32_t activation;
  uint32_t activated;  // so many outputs, the first, have a pointwise activation
  uint32_t bias_dtype;
  uint32_t has_bias;
  uint32_t has_residual;
  uint32_t has_order;  // of a linear layer: it is where experts have their ids
  float alpha;
  float limit;
  float factor;       // of what a pointwise activation is computed of
  float norm_eps;     // of the RMSNorm of the inputs, in kernels that have one
  float norm_offset;  // what is added to its weight
};

struct ExpertDownParams {
  MatmulParams matmul;
  ExpertSumParams sum;
};

// Strides are in elements.
struct HeadStrides {
  uint64_t batch;
  uint64_t token;
  uint64_t head;
};

// A matrix for each head: `matrix.rows` from the first row of a head to that of the next, of which
// `matrix.outputs` are used; `matrix.inputs` columns.
struct HeadsParams {
  MatmulParams matrix;
  HeadStrides x;
  HeadStrides tail;
  uint32_t tokens;  // of the whole batch
  uint32_t tokens_of_batch;
  uint32_t heads;
  uint32_t tail_width;
};

// index_scores and index_select. Strides are in elements; those of scores and indices are of whole rows.
struct IndexParams {
  TokenStrides q;
  TokenStrides k;
  TokenStrides weights;
  uint32_t tokens;
  uint32_t first_token;  // of those whose scores are in memory
  uint32_t tokens_at_once;
  uint32_t heads;
  uint32_t groups;  // of heads that choose together
  uint32_t width;
  uint32_t keys;
  uint32_t rows;  // of scores: blocks of keys
  uint32_t block;
  uint32_t is_pooled;  // k has a row for each complete block, else for each key
  uint32_t tail;
  uint32_t chosen;
  uint32_t slots;  // of a result: indices, or words of bits
  uint32_t as_bits;
  uint32_t has_weights;
  uint32_t weights_dtype;
  uint32_t has_key_range;
  uint32_t vectorised;  // keys are read 4 elements at a time
  float scale;
};

// pool_windows. Strides are in elements; the state is contiguous.
struct PoolParams {
  TokenStrides kv;
  TokenStrides gate;
  TokenStrides entries;  // whose tokens are entries
  uint32_t tokens;
  uint32_t position;  // tokens before the new ones
  uint32_t rate;      // tokens of a window
  uint32_t parts;     // of a window's tokens, for each of which there are threads
  uint32_t rows;      // tokens of the state
  uint32_t columns;   // of a token: those of an entry, or twice as many if windows overlap
  uint32_t width;     // of an entry
  uint32_t turning;   // pairs of an entry
  uint32_t freq_dtype;
  uint32_t bias_dtype;
  uint32_t weight_dtype;
  float scaling;
  float eps;
};

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

// embedding_rows: matrix.experts is the number of rows that the matrix has, matrix.pairs the number of ids.
struct EmbeddingParams {
  MatmulParams matrix;
  uint32_t out_dtype;
};

// Formulas of elements

#define POINTWISE_INPUTS 6
#define POINTWISE_STEPS 32
#define POINTWISE_NUMBERS 12
#define POINTWISE_RANK 4
// dtypes of inputs behind those above
#define DTYPE_INT 3
#define DTYPE_LONG 4
#define DTYPE_NONE 5  // an input that is not given
// An operand: an input, the result of a step, or a number
#define POINTWISE_FIRST_STEP POINTWISE_INPUTS
#define POINTWISE_FIRST_NUMBER (POINTWISE_INPUTS + POINTWISE_STEPS)

// Operations, in the order of ops/pointwise.py
#define POINTWISE_TO 0
#define POINTWISE_NEG 1
#define POINTWISE_EXP 2
#define POINTWISE_LOG 3
#define POINTWISE_LOG1P 4
#define POINTWISE_SQRT 5
#define POINTWISE_RSQRT 6
#define POINTWISE_SIGMOID 7
#define POINTWISE_SILU 8
#define POINTWISE_SOFTPLUS 9
#define POINTWISE_TANH 10
#define POINTWISE_RELU 11
#define POINTWISE_ADD 12
#define POINTWISE_SUB 13
#define POINTWISE_MUL 14
#define POINTWISE_DIV 15
#define POINTWISE_MAX 16
#define POINTWISE_MIN 17

struct PointwiseStep {
  uint8_t operation;
  uint8_t x;
  uint8_t y;
  uint8_t dtype;  // of the result
};

struct PointwiseParams {
  uint32_t sizes[POINTWISE_RANK];
  uint32_t strides[POINTWISE_INPUTS][POINTWISE_RANK];  // in elements; 0 where an input is broadcast
  uint32_t count;                                      // elements of the result
  uint32_t terms;  // of a mean, whose dimension is the last but one and has size 1 above
  uint32_t steps;
  uint8_t dtypes[8];  // of inputs
  PointwiseStep code[POINTWISE_STEPS];
  float numbers[POINTWISE_NUMBERS];
};
