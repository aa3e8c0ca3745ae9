// Experts
#pragma once

#define ACTIVATION_NONE 0
#define ACTIVATION_SILU 1
#define ACTIVATION_GELU 2
#define ACTIVATION_GELU_TANH 3
#define ACTIVATION_RELU 4
#define ACTIVATION_RELU2 5
#define ACTIVATION_SWIGLU_OAI 6
#define ACTIVATION_SILU_CLAMPED 7
#define ACTIVATION_SILU_CAPPED 8

// Numbers of swiglu_oai where a call gives none; ops/_activations.py has them for the reference.
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
  uint32_t shares_inputs;   // of matmul_rows: simdgroups have shares of the inputs, else rows of their own
  uint32_t writes_tiles;    // the kernel writes the list of pairs by expert for the down projection
  uint32_t row_layout;
  uint32_t activation;
  uint32_t shared_activation;  // of the pair behind a token's `pairs`, if there is one
  uint32_t activated;          // so many outputs, the first, have a pointwise activation
  uint32_t bias_dtype;
  uint32_t has_bias;
  uint32_t has_residual;
  uint32_t has_order;  // of a linear layer: it is where experts have their ids
  uint32_t wide_out;   // outputs are float32, whatever the inputs are
  float alpha;
  float limit;
  float factor;              // of what a pointwise activation is computed of
  float norm_eps;            // of the RMSNorm of the inputs, in kernels that have one
  float norm_weight_offset;  // what is added to its weight
};

struct ExpertDownParams {
  MatmulParams matmul;
  ExpertSumParams sum;
  uint32_t has_shared_expert;  // 1: of the only token, which has a pair more for it
  uint32_t has_identity;       // ids beyond the experts weigh shared_out
};

// A matrix for each head: `matrix.rows` from the first row of a head to that of the next, of which
// `matrix.outputs` are used; `matrix.inputs` columns.
struct HeadsParams {
  MatmulParams matrix;
  TokenStrides x;
  TokenStrides tail;
  uint32_t tokens;  // of the whole batch
  uint32_t tokens_of_batch;
  uint32_t heads;
  uint32_t tail_width;
};

// embedding_rows: matrix.experts is the number of rows that the matrix has, matrix.pairs the number of ids.
struct EmbeddingParams {
  MatmulParams matrix;
  uint32_t out_dtype;
};

// expert_outer: the numbers of a pair on the left and on the right.
struct OuterParams {
  uint32_t left;
  uint32_t right;
  uint32_t slots;
  uint32_t right_per_pair;  // else for each token
};
