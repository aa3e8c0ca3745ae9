// Rows of a matrix, dequantised.
#pragma once
#include "common/any_stores.h"
#include "matmul/common.h"
#include "matmul/formats.h"

// A threadgroup writes the row of one id; an id outside the matrix gives zeros. Grid: ids.
template <typename W>
[[kernel]] void embedding_rows(device const uchar* packed [[buffer(0)]],
                               device const uchar* scales [[buffer(1)]],
                               device const uchar* biases [[buffer(2)]], device const int* ids [[buffer(3)]],
                               device uchar* out [[buffer(4)]],
                               constant EmbeddingParams& params [[buffer(5)]],
                               uint index [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr int N = W::kTileValues;
  constant MatmulParams& matrix = params.matrix;
  const W weights(packed, scales, biases, 0, matrix);
  const uint number = expert_of(ids, index, matrix);
  for (uint column = thread_index * N; column < matrix.inputs; column += kEmbeddingThreads * N) {
    float2 pairs[N / 2];
    UNROLL for (int i = 0; i < N / 2; ++i) pairs[i] = float2(0.0f);
    if (number < matrix.rows) {
      const auto chunk = weights.template load<N>(weights.row(number), column, matrix.inputs - column);
      UNROLL for (int i = 0; i < N / 2; ++i) pairs[i] = W::values(chunk, i);
    }
    const Pack<N> values = in_order<N, W>(pairs);
    UNROLL for (int i = 0; i < N; i += 4) {
      const float4 four = float4(values.v[i], values.v[i + 1], values.v[i + 2], values.v[i + 3]);
      store_any(out, params.out_dtype, ulong(index) * matrix.inputs + column + i, four);
    }
  }
}
