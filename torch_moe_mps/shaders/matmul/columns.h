// Products with transposed matrices: what is multiplied has a number for each row, results one for each
// column.
#pragma once
#include "common/any_stores.h"
#include "common/simdgroups.h"
#include "matmul/formats.h"
#include "matmul/tiles.h"

// What a product multiplies: a number for each row of the matrix, M times.
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

// Rows of `x`, one for each pair, times the matrices of their experts. Grid: (slices of kHeadColumns columns,
// tiles of kTransposedPairs pairs).
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void transposed_tiles(
    device const typename W::Element* x [[buffer(0)]], device const uchar* packed [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device uchar* out [[buffer(4)]], device const int* pair_order [[buffer(5)]],
    device const int4* tiles [[buffer(6)]], constant TransposedParams& params [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], LANES) {
  constexpr int M = 1;  // with 2 a thread needs 135 registers, by the cost model
  constexpr uint kFours = kHeadColumns / 4, kThreads = kHeadSimdgroups * kSimdWidth;
  threadgroup float shared[M * kHeadSimdgroups * kHeadColumns];
  constant MatmulParams& matrix = params.matrix;
  const PairTile tile =
      tile_of(tiles, pair_order, matrix.has_ids != 0, group.y, uint(kTransposedPairs), matrix);
  const uint first = group.x * kHeadColumns, thread_index = simdgroup * kSimdWidth + lane;
  for (uint start = 0; start < tile.pairs.count; start += M) {
    const uint count = min(uint(M), tile.pairs.count - start);
    if (tile.expert >= 0) {
      RowNumbers<typename W::Element, M> numbers;
      UNROLL for (int m = 0; m < M; ++m) {
        numbers.v[m] = x + ulong(tile.pairs.at(start + min(uint(m), count - 1))) * matrix.outputs;
      }
      add_columns<W, M>(W(packed, scales, biases, uint(tile.expert), matrix), numbers, first, shared, lane,
                        simdgroup, matrix);
    }
    for (uint i = thread_index; i < count * kFours; i += kThreads) {
      const uint m = i / kFours, local = i % kFours * 4;
      if (first + local >= matrix.inputs) continue;  // a multiple of 16, as formats have groups
      float4 four = float4(0.0f);
      if (tile.expert >= 0) {
        UNROLL for (int j = 0; j < 4; ++j) four[j] = column_sum(shared, m, local + j);
      }
      store_any(out, params.out_dtype, ulong(tile.pairs.at(start + m)) * matrix.inputs + first + local, four);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums have been read
  }
}
