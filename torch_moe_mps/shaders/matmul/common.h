// Parts that the experts' kernels share: ids, rows of a matrix, buffers.
#pragma once
#include "common.h"
#include "common/dtypes.h"
#include "geometry/matmul.h"
#include "params/expert_sum.h"
#include "params/matmul.h"

// The expert of a pair; an id outside [0, experts) becomes `experts`.
inline uint expert_of_words(uint low, uint high, constant MatmulParams& params) {
  return min(high == 0 ? low : params.experts, params.experts);
}

inline uint expert_of(device const int* ids, uint pair, constant MatmulParams& params) {
  if (params.wide_ids == 0) return expert_of_words(uint(ids[pair]), 0, params);
  return expert_of_words(uint(ids[2 * pair]), uint(ids[2 * pair + 1]), params);
}

// Whether an id is not negative, and of none of the experts.
inline bool is_beyond(device const int* ids, uint pair, constant MatmulParams& params) {
  const long id = params.wide_ids != 0 ? reinterpret_cast<device const long*>(ids)[pair] : long(ids[pair]);
  return id >= long(params.experts);
}

// The weights of a token's ids beyond the experts, summed.
inline float weight_beyond(device const int* ids, device const uchar* routing, uint token,
                           constant ExpertDownParams& params) {
  float sum = 0.0f;
  for (uint slot = 0; slot < params.matmul.slots; ++slot) {
    const uint pair = token * params.matmul.slots + slot;
    const float weight = load_one(routing, params.sum.weights_dtype, pair);
    sum += select(0.0f, weight, is_beyond(ids, pair, params.matmul));
  }
  return sum;
}

inline uint input_row(uint pair, constant MatmulParams& params) {
  return params.x_per_pair != 0 ? pair : pair / params.slots;
}

// How many outputs this many rows of a matrix give: a gate row and an up row give one.
inline uint outputs_of_rows(uint rows, constant MatmulParams& params) {
  return params.row_layout == ROWS_PLAIN ? rows : rows / 2;
}

// The row of the matrix that holds an output, or its gate (0) or up (1).
inline uint weight_row(uint output, uint half_of_pair, constant MatmulParams& params) {
  if (params.row_layout == ROWS_INTERLEAVED) return 2 * output + half_of_pair;
  if (params.row_layout == ROWS_HALVES) return output + half_of_pair * params.outputs;
  return output;
}

// The buffers of the kernels, in the order in which the host binds them.
#define MATRIX_BUFFERS(T)                                                                 \
  device const T *x [[buffer(0)]], device const uchar *packed [[buffer(1)]],              \
      device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], \
      device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]],        \
      device T *out [[buffer(6)]]
#define MATMUL_BUFFERS(T) \
  MATRIX_BUFFERS(T), device const T *residual [[buffer(7)]], constant MatmulParams &params [[buffer(8)]]
#define DOWN_BUFFERS(T)                                                                        \
  MATRIX_BUFFERS(T), device const uchar *routing [[buffer(7)]],                                \
      device const uchar *shared_gate [[buffer(8)]], device const T *shared_out [[buffer(9)]], \
      device const T *residual [[buffer(10)]], constant ExpertDownParams &params [[buffer(11)]]
