// Products with transposed matrices: what is multiplied has a number for each row, results one for each
// column.
#pragma once
#include "common/simdgroups.h"
#include "matmul/formats.h"

// Right side of a product: a number for each row of the matrix, M times.
template <typename T, int M>
struct RowNumbers {
  device const T* v[M];
};

// Adds up a threadgroup's kHeadColumns columns from `first` on to shared[M][kHeadSimdgroups][kHeadColumns]: a
// lane has the next values of a row, as many as a tile's chunk, and the rows are shared out among the lanes
// of the threadgroup that have the same columns. The sums over the simdgroups are left to column_sum().
template <typename W, int M>
inline void add_columns(W weights, RowNumbers<typename W::Element, M> numbers, uint first,
                        threadgroup float* shared, uint lane, uint simdgroup, constant MatmulParams& matrix) {
  constexpr int N = W::kTileValues;
  constexpr uint kLanes = kHeadColumns / N;  // of a row
  constexpr uint kThreads = kHeadSimdgroups * kSimdWidth;
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint column = first + lane % kLanes * N;
  float2 sums[M][N / 2];  // in the order in which a chunk has its values
  UNROLL for (int m = 0; m < M; ++m) {
    UNROLL for (int i = 0; i < N / 2; ++i) sums[m][i] = float2(0.0f);
  }
  if (column < matrix.inputs) {
    for (uint row = thread_index / kLanes; row < matrix.outputs; row += kThreads / kLanes) {
      const auto chunk = weights.template load<N>(weights.row(row), column, matrix.inputs - column);
      UNROLL for (int i = 0; i < N / 2; ++i) {
        const float2 two = W::values(chunk, i);
        UNROLL for (int m = 0; m < M; ++m) {
          sums[m][i] = fma(two, float2(float(numbers.v[m][row])), sums[m][i]);
        }
      }
    }
  }
  UNROLL for (int m = 0; m < M; ++m) {
    UNROLL for (int i = 0; i < N; ++i) {
      const FragmentElement place = W::place_of(i);
      float sum = sums[m][place.number][place.element];
      UNROLL for (ushort distance = kLanes; distance < kSimdWidth; distance *= 2) {
        sum += simd_shuffle_xor(sum, distance);
      }
      if (lane < kLanes) shared[(m * kHeadSimdgroups + simdgroup) * kHeadColumns + lane * N + i] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

inline float column_sum(threadgroup const float* shared, uint m, uint local) {
  float sum = 0.0f;
  UNROLL for (uint s = 0; s < kHeadSimdgroups; ++s) {
    sum += shared[(m * kHeadSimdgroups + s) * kHeadColumns + local];
  }
  return sum;
}
