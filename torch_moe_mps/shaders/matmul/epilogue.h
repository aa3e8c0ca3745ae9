// From sums to outputs: bias, activation, and what an expert's output is combined with.
#pragma once
#include "common/dtypes.h"
#include "matmul/activations.h"
#include "matmul/common.h"

inline float with_bias(float value, device const uchar* bias, uint expert, uint row,
                       constant MatmulParams& params) {
  return params.has_bias != 0 ? value + load_one(bias, params.bias_dtype, ulong(expert) * params.rows + row)
                              : value;
}

// Makes an output from the dot product of its row, or from the two of its gate row and its up row.
inline float finished_output(float own, float up, device const uchar* bias, uint expert, uint output,
                             uint activation, constant MatmulParams& params) {
  if (params.row_layout == ROWS_PLAIN) {
    const float value = with_bias(own, bias, expert, output, params);
    if (output >= params.activated) return value;
    return pointwise_activation(params.factor * value, activation);
  }
  return gated_activation(with_bias(own, bias, expert, weight_row(output, 0, params), params),
                          with_bias(up, bias, expert, weight_row(output, 1, params), params), activation,
                          params);
}

// Where the outputs of a matmul go, and what is added to them. kShared: pairs may be of a shared expert.
template <typename T, bool kShared = false>
struct Outputs {
  device const uchar* bias;
  device const T* residual;
  device T* out;
  device const int* order;  // the column that each output goes to, if params.has_order

  void store(float own, float up, uint pair, uint expert, uint output, constant MatmulParams& params) const {
    const uint column = params.has_order != 0 ? uint(order[output]) : output;
    if (column >= params.outputs) return;
    const ulong index = ulong(pair) * params.outputs + column;
    const uint activation = kShared && pair >= params.pairs ? params.shared_activation : params.activation;
    float value = finished_output(own, up, bias, expert, output, activation, params);
    if (params.has_residual != 0) value += float(residual[index]);
    if (params.wide_out != 0) {
      reinterpret_cast<device float*>(out)[index] = value;
    } else {
      out[index] = T(value);
    }
  }
};
