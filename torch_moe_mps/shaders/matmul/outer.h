// Sums of outer products, for each expert those of its pairs: the gradient of a stack of matrices.
#pragma once
#include "matmul/gemm.h"

// A simdgroup has kOuterSide rows x kOuterSide columns of one expert. The left operand is rows x pairs, the
// right one pairs x columns: a lane loads runs of neighbours of two pairs on the left, and of one pair on the
// right. Which rows a fragment has is free: fragment i has the i-th of the runs.
template <typename T>
struct OuterSums {
  typedef simdgroup_matrix<float, 8, 8> Matrix;
  static constant constexpr int kTiles = kOuterSide / 8;
  static constant constexpr int kLeft = kTiles, kRight = 2 * kTiles;  // of a run

  Matrix sums[kTiles][kTiles];
  uint row, column;  // the first of the lane's

  OuterSums(uint first_row, uint first_column, MatrixPlace place)
      : row(first_row + place.row * kLeft), column(first_column + place.quarter * kRight) {
    UNROLL for (int i = 0; i < kTiles; ++i) {
      UNROLL for (int j = 0; j < kTiles; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  // The run from `start` on in a row of `width` numbers; zeros past its end, and where there is no row.
  template <int N>
  static Elements<T, N> run_of(device const T* rows, ulong row, uint start, uint width, bool exists) {
    if (!exists || start >= width) return Elements<T, N>{};
    return load_elements<N>(rows + (row * width + start), width - start, width % N == 0);
  }

  // Adds the products of the eight pairs from position `first` on in the expert's list, which ends at `end`.
  void add(device const T* left, device const T* right, device const int* list, int first, int end,
           MatrixPlace place, constant OuterParams& params) {
    Elements<T, kLeft> own[2];
    UNROLL for (int j = 0; j < 2; ++j) {
      const int position = first + int(2 * place.quarter) + j;
      const uint pair = uint(list[min(position, end - 1)]);
      own[j] = run_of<kLeft>(left, pair, row, params.left, position < end);
    }
    const int position = first + int(place.row);
    const uint pair = uint(list[min(position, end - 1)]);
    const uint source = params.right_per_pair != 0 ? pair : pair / params.slots;
    const Elements<T, kRight> others = run_of<kRight>(right, source, column, params.right, position < end);
    UNROLL for (int j = 0; j < kTiles; ++j) {
      const Matrix columns = fragment_of(others.at(2 * j), others.at(2 * j + 1));
      UNROLL for (int i = 0; i < kTiles; ++i) {
        simdgroup_multiply_accumulate(sums[i][j], fragment_of(own[0].at(i), own[1].at(i)), columns,
                                      sums[i][j]);
      }
    }
  }

  void store(device float* out, constant OuterParams& params) {
    UNROLL for (int i = 0; i < kTiles; ++i) {
      if (row + i >= params.left) continue;
      device float* target = out + (ulong(row + i) * params.right + column);
      UNROLL for (int j = 0; j < kTiles; ++j) {
        Matrix matrix = sums[i][j];
        UNROLL for (int k = 0; k < 2; ++k) {
          if (column + 2 * j + k < params.right) target[2 * j + k] = matrix.thread_elements()[k];
        }
      }
    }
  }
};

// The pairs of an expert are taken in ascending order, eight at a time. Grid: (kGemmSimdgroups squares of
// kOuterSide rows and columns, experts).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_outer(
    device const T* left [[buffer(0)]], device const T* right [[buffer(1)]],
    device const int* pair_order [[buffer(2)]], device const int* offsets [[buffer(3)]],
    device float* out [[buffer(4)]], constant OuterParams& params [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], LANES) {
  const uint across = (params.right + kOuterSide - 1) / kOuterSide;
  const uint square = group.x * kGemmSimdgroups + simdgroup;
  const uint row = square / across * kOuterSide, column = square % across * kOuterSide;
  if (row >= params.left) return;
  const MatrixPlace place(lane);
  OuterSums<T> sums(row, column, place);
  const int end = offsets[group.y + 1];
  for (int first = offsets[group.y]; first < end; first += 8) {
    sums.add(left, right, pair_order, first, end, place, params);
  }
  sums.store(out + group.y * ulong(params.left) * params.right, params);
}
