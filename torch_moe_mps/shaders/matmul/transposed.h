// Products with transposed matrices for tiles of up to kTilePairs pairs of one expert: what is multiplied has
// a number for each row of the matrix, results one for each column.
//
// A lane's chunk of a row fills fragments as in gemm.h, but of the right operand, rows x columns. The sums of
// a simdgroup are pairs x its columns, and the loop goes over rows: each weight is dequantised once a tile.
// A lane's two numbers of the left operand are neighbours in a row of `x`, and its sums are neighbours in a
// row of the result, so that nothing goes through threadgroup memory and no simdgroup waits for another.
#pragma once
#include "common/vectors.h"
#include "matmul/gemm.h"

// Weights are decoded exactly: a gradient may cancel to far less than its terms.
template <typename W, typename T>
struct TransposedWork {
  W weights;
  device const T* x;
  TilePairs pairs;
  device T* out;
};

// The work of a simdgroup on up to 8 * kPairTiles pairs. Four lanes have chunks of each row, from column
// `span` on, of which each takes part kPart: kOwn columns.
template <typename W, typename T, int kPairTiles, int kPart>
struct TransposedGemm {
  typedef simdgroup_matrix<float, 8, 8> Matrix;  // of halves, weights would be rounded, at no less cost
  static constant constexpr int kOwn = W::kTileValues < 16 ? W::kTileValues : 16;
  static constant constexpr int kFragments = kOwn / 2;

  // The lane's two numbers of each pair in eight rows from `first` on; zeros past the last row.
  struct Numbers {
    device const T* x;
    uint starts[kPairTiles];
    Elements<T, 2> two[kPairTiles];

    // Pairs past the last one are copies of it, and their sums are not stored.
    Numbers(device const T* x_, TilePairs pairs, MatrixPlace place, constant MatmulParams& params) : x(x_) {
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        starts[p] = input_row(pairs.at(min(8 * p + place.row, pairs.count - 1)), params) * params.outputs;
      }
    }

    void load(uint row, constant MatmulParams& params) {
      UNROLL for (int p = 0; p < kPairTiles; ++p) two[p] = Elements<T, 2>{};
      if (row >= params.outputs) return;
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        two[p] = load_elements<2>(x + (starts[p] + row), params.outputs - row, params.outputs % 2 == 0);
      }
    }

    Matrix matrix(int p) const { return fragment_of(two[p].at(0), two[p].at(1)); }
  };

  static void run(TransposedWork<W, T> work, uint span, uint lane, constant MatmulParams& params) {
    const MatrixPlace place(lane);
    const uint column = span + place.quarter * W::kTileValues;
    typedef typename W::template Chunk<W::kTileValues> Chunk;
    Numbers numbers(work.x, work.pairs, place, params);
    Matrix sums[kPairTiles][kFragments];
    UNROLL for (int p = 0; p < kPairTiles; ++p) {
      UNROLL for (int f = 0; f < kFragments; ++f) {
        sums[p][f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    for (uint first = 0; first < params.outputs; first += 8) {
      const uint row = first + place.row;
      Chunk chunk = Chunk{};
      if (row < params.outputs && column < params.inputs) {
        chunk =
            work.weights.template load<W::kTileValues>(work.weights.row(row), column, params.inputs - column);
      }
      numbers.load(first + 2 * place.quarter, params);
      Matrix left[kPairTiles];
      UNROLL for (int p = 0; p < kPairTiles; ++p) left[p] = numbers.matrix(p);
      UNROLL for (int f = 0; f < kFragments; ++f) {
        const float2 two = W::values(chunk, kPart * kFragments + f);
        const Matrix right = fragment_of(two.x, two.y);
        UNROLL for (int p = 0; p < kPairTiles; ++p) {
          simdgroup_multiply_accumulate(sums[p][f], left[p], right, sums[p][f]);
        }
      }
    }
    const MatrixPlace same(anew(lane, lane));
    UNROLL for (int p = 0; p < kPairTiles; ++p) {
      if (8 * p + same.row >= work.pairs.count) continue;
      const uint pair = work.pairs.at(8 * p + same.row);
      write(sums[p], work.out + ulong(pair) * params.inputs,
            span + same.quarter * W::kTileValues + kPart * kOwn, params);
    }
  }

  static void write(thread Matrix* sums, device T* out, uint column, constant MatmulParams& params) {
    UNROLL for (int i = 0; i < kOwn; i += 4) {
      float4 four;
      UNROLL for (int j = 0; j < 4; ++j) {
        const FragmentElement place = W::place_of(i + j);
        four[j] = sums[place.number].thread_elements()[place.element];
      }
      if (!W::kAnyLength || params.vectorised != 0) {
        if (column + i < params.inputs) store(out + (column + i), four);
        continue;
      }
      UNROLL for (int j = 0; j < 4; ++j) {
        if (column + i + j < params.inputs) out[column + i + j] = T(four[j]);
      }
    }
  }
};

// Runs the TransposedGemm with the fewest pair tiles that hold the pairs.
template <typename W, typename T, int kPairTiles, int kPart>
inline void run_transposed(TransposedWork<W, T> work, uint span, uint lane, constant MatmulParams& params) {
  if constexpr (kPairTiles < kTilePairs / 8) {
    if (work.pairs.count > 8 * kPairTiles) {
      run_transposed<W, T, kPairTiles + 1, kPart>(work, span, lane, params);
      return;
    }
  }
  TransposedGemm<W, T, kPairTiles, kPart>::run(work, span, lane, params);
}

// Rows of `x` times the matrices of their experts: `params.outputs` numbers of a pair, `params.inputs`
// results. Grid: (blocks of columns, tiles).
template <typename Weights>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void gemm_transposed(
    device const typename Weights::Element* x [[buffer(0)]], device const uchar* packed [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device typename Weights::Element* out [[buffer(4)]], device const int* pair_order [[buffer(5)]],
    device const int4* tiles [[buffer(6)]], constant MatmulParams& params [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], LANES) {
  typedef typename Weights::Element T;
  typedef typename ExactFormat<Weights>::type W;
  constexpr uint kColumns = kTransposedColumns / kGemmSimdgroups;  // of a simdgroup
  constexpr uint kSpan = 4 * W::kTileValues;                       // of its lanes' chunks
  const PairTile tile = tile_of(tiles, pair_order, params.has_ids != 0, group.y, uint(kTilePairs), params);
  const uint first = group.x * kTransposedColumns + simdgroup * kColumns;
  if (tile.expert < 0) {
    const uint end = min(first + kColumns, params.inputs);
    for (uint pair = 0; pair < tile.pairs.count; ++pair) {
      device T* row = out + ulong(tile.pairs.at(pair)) * params.inputs;
      for (uint column = first + lane; column < end; column += kSimdWidth) row[column] = T(0.0f);
    }
    return;
  }
  const TransposedWork<W, T> work = {W(packed, scales, biases, uint(tile.expert), params), x, tile.pairs,
                                     out};
  const uint span = first / kSpan * kSpan;
  if (span >= params.inputs) return;
  if constexpr (kSpan < kColumns) {
    run_transposed<W, T, 1, 0>(work, span, lane, params);
    run_transposed<W, T, 1, 0>(work, span + kSpan, lane, params);
  } else if constexpr (kSpan == kColumns) {
    run_transposed<W, T, 1, 0>(work, span, lane, params);
  } else if (first == span) {  // two simdgroups share a span
    run_transposed<W, T, 1, 0>(work, span, lane, params);
  } else {
    run_transposed<W, T, 1, 1>(work, span, lane, params);
  }
}
