// The last step of the experts for many tokens: the weighted sum over a token's slots, the shared expert and
// the residual.
#pragma once
#include "common/vectors.h"
#include "expert_sum.h"
#include "matmul/common.h"

// N columns of a token, slots ascending.
template <typename T, int N>
inline void combine_columns(device const T* slots, device const int* ids, device const uchar* routing,
                            Addends<T> addends, device T* out, uint token, uint column,
                            constant ExpertDownParams& params) {
  constant MatmulParams& matmul = params.matmul;
  Floats<N> sum = 0.0f;
  for (uint slot = 0; slot < matmul.slots; ++slot) {
    const uint pair = token * matmul.slots + slot;
    if (expert_of(ids, pair, matmul) == matmul.experts) continue;
    const Floats<N> weight = load_one(routing, params.sum.weights_dtype, pair);
    sum = fma(weight, widen(load<N>(slots + ulong(pair) * matmul.outputs + column)), sum);
  }
  if (params.has_identity != 0) {
    const Floats<N> weight = weight_beyond(ids, routing, token, params);
    sum = fma(weight, widen(load<N>(addends.shared_out + ulong(token) * matmul.outputs + column)), sum);
  }
  sum = addends.add_to(sum, token, column, matmul.outputs, params.sum);
  store(out + ulong(token) * matmul.outputs + column, sum);
}

// Grid: (blocks of columns, tokens).
template <typename T>
[[kernel]] void expert_combine(device const T* slots [[buffer(0)]], device const int* ids [[buffer(1)]],
                               device const uchar* routing [[buffer(2)]],
                               device const uchar* shared_gate [[buffer(3)]],
                               device const T* shared_out [[buffer(4)]],
                               device const T* residual [[buffer(5)]], device T* out [[buffer(6)]],
                               constant ExpertDownParams& params [[buffer(7)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint2 threads [[threads_per_threadgroup]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
  const Addends<T> addends = {shared_gate, shared_out, residual};
  const uint outputs = params.matmul.outputs;
  const uint column = (group.x * threads.x + thread_index) * kCombineColumns;
  if (outputs % kCombineColumns == 0) {
    if (column >= outputs) return;
    combine_columns<T, kCombineColumns>(slots, ids, routing, addends, out, group.y, column, params);
  } else {
    for (uint i = column; i < min(column + kCombineColumns, outputs); ++i) {
      combine_columns<T, 1>(slots, ids, routing, addends, out, group.y, i, params);
    }
  }
}
