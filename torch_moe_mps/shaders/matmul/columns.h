// Dense weights with the input dimension first, for a single token. A lane takes a column; the simdgroups
// take turns at the inputs.
#pragma once
#include "matmul/epilogue.h"
#include "matmul/formats.h"

constant constexpr int kColumnUnroll = 8;

// The simdgroup's part of the product of x and one column: inputs simdgroup, simdgroup + kColumnSimdgroups,
// and so on.
template <typename T>
inline float column_dot(DenseColumns<T> weights, device const T* x, uint column, uint simdgroup,
                        uint inputs) {
  float dot = 0.0f;
  for (uint start = simdgroup; start < inputs; start += kColumnUnroll * kColumnSimdgroups) {
    T values[kColumnUnroll];
    UNROLL for (int i = 0; i < kColumnUnroll; ++i) {
      const uint input = start + i * kColumnSimdgroups;
      values[i] = input < inputs ? weights.element(column, input) : T(0.0f);
    }
    UNROLL for (int i = 0; i < kColumnUnroll; ++i) {
      const uint input = start + i * kColumnSimdgroups;
      if (input < inputs) dot = fma(float(values[i]), float(x[input]), dot);
    }
  }
  return dot;
}

// The sum over the simdgroups, in each of them.
inline float sum_over_simdgroups(float value, threadgroup float* partials, uint lane, uint simdgroup) {
  partials[simdgroup * kSimdWidth + lane] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  UNROLL for (uint s = 0; s < kColumnSimdgroups; ++s) sum += partials[s * kSimdWidth + lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return sum;
}

// Grid: (blocks of 32 outputs, pairs).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kColumnSimdgroups* kSimdWidth)]] void matmul_columns(
    MATMUL_BUFFERS(T), uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partials[kColumnSimdgroups * kSimdWidth];
  const uint pair = group.y;
  const uint output = group.x * kSimdWidth + lane;
  const bool stores = simdgroup == 0 && output < params.outputs;
  const ulong target = ulong(pair) * params.outputs + output;
  const uint expert = expert_of(ids, pair, params);
  if (expert == params.experts) {
    if (stores) out[target] = T(0.0f);
    return;
  }
  const DenseColumns<T> weights(packed, scales, biases, expert, params);
  device const T* input = x + ulong(input_row(pair, params)) * params.inputs;
  const uint safe = min(output, params.outputs - 1);
  const uint first = weight_row(safe, 0, params), second = weight_row(safe, 1, params);
  float own = column_dot(weights, input, first, simdgroup, params.inputs), up = 0.0f;
  own = sum_over_simdgroups(own, partials, lane, simdgroup);
  if (params.row_layout != ROWS_PLAIN) {
    up = column_dot(weights, input, second, simdgroup, params.inputs);
    up = sum_over_simdgroups(up, partials, lane, simdgroup);
  }
  const Outputs<T> outputs = {bias, residual, out, ids};
  if (stores) outputs.store(own, up, pair, expert, output, params);
}

// Grid: (blocks of 32 outputs, tokens).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kColumnSimdgroups* kSimdWidth)]] void expert_down_columns(
    DOWN_BUFFERS(T), uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partials[kColumnSimdgroups * kSimdWidth];
  constant MatmulParams& matmul = params.matmul;
  const uint token = group.y;
  const uint output = group.x * kSimdWidth + lane;
  const uint column = min(output, matmul.outputs - 1);
  const Addends<T> addends = {shared_gate, shared_out, residual};
  float sum = 0.0f;
  for (uint slot = 0; slot < matmul.slots; ++slot) {
    const uint pair = token * matmul.slots + slot;
    const uint expert = expert_of(ids, pair, matmul);
    if (expert == matmul.experts) continue;
    const DenseColumns<T> weights(packed, scales, biases, expert, matmul);
    const float dot = column_dot(weights, x + ulong(pair) * matmul.inputs, column, simdgroup, matmul.inputs);
    const float value = simdgroup == 0 ? with_bias(dot, bias, expert, column, matmul) : dot;
    sum = fma(load_one(routing, params.sum.weights_dtype, pair), value, sum);
  }
  sum = sum_over_simdgroups(sum, partials, lane, simdgroup);
  if (simdgroup == 0 && output < matmul.outputs) {
    out[ulong(token) * matmul.outputs + output] =
        T(addends.add_to(sum, token, output, matmul.outputs, params.sum));
  }
}
