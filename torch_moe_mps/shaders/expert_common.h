// What the kernels of the experts share.
#pragma once
#include "activations.h"

// An id by its words; one outside [0, experts) becomes `experts`.
inline uint expert_of_words(uint low, uint high, constant ExpertParams& params) {
  return min(high == 0 ? low : params.experts, params.experts);
}

inline uint expert_of(device const int* ids, uint pair, constant ExpertParams& params) {
  if (params.wide_ids == 0) return expert_of_words(uint(ids[pair]), 0, params);
  return expert_of_words(uint(ids[2 * pair]), uint(ids[2 * pair + 1]), params);
}

inline uint input_row(uint pair, constant ExpertParams& params) {
  return params.x_per_pair != 0 ? pair : pair / params.slots;
}

inline float with_bias(float value, device const uchar* bias, uint expert, uint row,
                       constant ExpertParams& params) {
  return params.has_bias != 0 ? value + load_one(bias, params.bias_dtype, ulong(expert) * params.rows + row)
                              : value;
}

// The row of the matrix that holds an output, or its gate (0) or up (1).
inline uint weight_row(uint output, uint half_of_pair, constant ExpertParams& params) {
  if (params.row_layout == ROWS_INTERLEAVED) return 2 * output + half_of_pair;
  if (params.row_layout == ROWS_HALVES) return output + half_of_pair * params.outputs;
  return output;
}

// An output from the dot product of its row, and one from those of its gate's and its up's row.
inline float plain_output(float dot, device const uchar* bias, uint expert, uint output,
                          constant ExpertParams& params) {
  return pointwise_activation(with_bias(dot, bias, expert, output, params), params.activation);
}

inline float gated_output(float gate, float up, device const uchar* bias, uint expert, uint output,
                          constant ExpertParams& params) {
  return gated_activation(with_bias(gate, bias, expert, weight_row(output, 0, params), params),
                          with_bias(up, bias, expert, weight_row(output, 1, params), params), params);
}

inline float finished_output(float own, float up, device const uchar* bias, uint expert, uint output,
                             constant ExpertParams& params) {
  return params.row_layout == ROWS_PLAIN ? plain_output(own, bias, expert, output, params)
                                         : gated_output(own, up, bias, expert, output, params);
}

// A token's experts are done: the shared expert and the residual come on top.
inline float combined(float sum, uint token, uint column, uint columns, device const uchar* shared_gate,
                      device const uchar* shared_out, device const uchar* residual, uint dtype,
                      constant ExpertCombineParams& params) {
  const ulong index = ulong(token) * columns + column;
  if (params.has_shared != 0) {
    float gate = 1.0f;
    if (params.has_gate != 0) gate = load_one(shared_gate, params.gate_dtype, token);
    if (params.has_gate != 0 && params.gate_is_logit != 0) gate = sigmoid(gate);
    sum += gate * load_one(shared_out, dtype, index);
  }
  if (params.has_residual != 0) sum += load_one(residual, dtype, index);
  return sum;
}

template <typename T>
inline uint dtype_of() {
  if (is_same_v<T, float>) return DTYPE_FLOAT;
  return is_same_v<T, half> ? DTYPE_HALF : DTYPE_BFLOAT;
}

// The buffers of the kernels for few tokens, in the order in which csrc/expert_paths.mm binds them; the down
// projections have those of the sum over the experts too.
#define EXPERT_BUFFERS(T)                                                                 \
  device const T *x [[buffer(0)]], device const uchar *packed [[buffer(1)]],              \
      device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], \
      device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]],        \
      device T *out [[buffer(6)]]
#define EXPERT_ROWS_BUFFERS(T) EXPERT_BUFFERS(T), constant ExpertParams& params [[buffer(7)]]
#define EXPERT_DOWN_BUFFERS(T)                                                                     \
  EXPERT_BUFFERS(T), device const uchar *routing [[buffer(7)]],                                    \
      device const uchar *shared_gate [[buffer(8)]], device const uchar *shared_out [[buffer(9)]], \
      device const uchar *residual [[buffer(10)]], constant ExpertDownParams &params [[buffer(11)]]
// Of those for several tokens, which go through the pairs in the order of their experts.
#define EXPERT_DOWN_FEW_BUFFERS(T)                                  \
  EXPERT_DOWN_BUFFERS(T), device const uint4 *order [[buffer(12)]], \
      threadgroup float *memory [[threadgroup(0)]]
