// Rows of a matrix times the inputs of a few pairs, by one simdgroup.
//
// Eight lanes share a row and stride over its chunks, so that short rows leave few lanes idle; the simdgroup
// has four such groups of lanes, each with R neighbouring rows. A lane loads the inputs of a chunk once for
// its R rows, and each byte of a row once for M pairs.
#pragma once
#include "matmul/formats.h"

constant constexpr uint kRowGroups = kRowGroupsOfSimdgroup;
constant constexpr uint kRowLanes = kSimdWidth / kRowGroups;

template <int R>
struct RowSet {
  uint v[R];
};

// The offsets in x, in elements, at which the inputs of M pairs start.
template <int M>
struct Sources {
  uint v[M];
};

template <int R, int M>
struct Dots {
  float v[R][M];
};

// The rows of a lane in a block of kRowGroups * R rows whose first output is `first`; gate and up rows
// alternate. Past the last output the rows of the last one are read again, and their results are not stored.
template <int R>
inline RowSet<R> rows_of_lane(uint first, uint lane, constant MatmulParams& params) {
  RowSet<R> rows;
  UNROLL for (int r = 0; r < R; ++r) {
    const uint local = lane / kRowLanes * R + r;
    const uint output = min(first + outputs_of_rows(local, params), params.outputs - 1);
    rows.v[r] = weight_row(output, local % 2, params);
  }
  return rows;
}

// Adds the products of a chunk of R rows with the inputs of M pairs. The codes themselves are multiplied;
// scale and offset are applied once for the whole chunk.
template <typename W, int R, int M, typename C>
inline void add_chunks(thread C* chunks, device const typename W::Element* x, Sources<M> sources, uint column,
                       uint left, thread Dots<R, M>& dots, constant MatmulParams& params) {
  constexpr int kPackSize = W::kPackSize;
  const bool vectorised = W::kAnyLength ? params.vectorised != 0 : true;
  Dots<R, M> coded;
  InputSums sums[M];
  UNROLL for (int m = 0; m < M; ++m) {
    sums[m].v[0] = sums[m].v[1] = 0.0f;
    UNROLL for (int r = 0; r < R; ++r) coded.v[r][m] = 0.0f;
  }
  UNROLL for (int pack = 0; pack < W::kValues / kPackSize; ++pack) {
    Pack<kPackSize> inputs[M];
    UNROLL for (int m = 0; m < M; ++m) {
      const uint start = W::kAnyLength ? min(uint(pack * kPackSize), left) : pack * kPackSize;
      const auto loaded =
          load_elements<kPackSize>(x + sources.v[m] + column + start, left - start, vectorised);
      UNROLL for (int i = 0; i < kPackSize; ++i) inputs[m].v[i] = loaded.at(i);
      W::add_inputs(inputs[m], sums[m]);
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const Pack<kPackSize> codes = W::codes(chunks[r], pack);
      UNROLL for (int m = 0; m < M; ++m) {
        UNROLL for (int i = 0; i < kPackSize; ++i) {
          coded.v[r][m] = fma(codes.v[i], inputs[m].v[i], coded.v[r][m]);
        }
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int m = 0; m < M; ++m) {
      dots.v[r][m] += W::scaled(chunks[r], coded.v[r][m], sums[m]);
    }
  }
}

// The dot products of a lane's R rows with the inputs of M pairs. All eight lanes that share the rows get
// them.
template <typename W, int R, int M>
inline Dots<R, M> row_dots(W weights, RowSet<R> rows, device const typename W::Element* x, Sources<M> sources,
                           uint lane, constant MatmulParams& params) {
  typedef typename W::template Chunk<W::kValues> Chunk;
  constexpr uint kStride = kRowLanes * W::kValues;
  const uint inputs = params.inputs;
  typename W::Row starts[R];
  Dots<R, M> dots;
  UNROLL for (int r = 0; r < R; ++r) {
    starts[r] = weights.row(rows.v[r]);
    UNROLL for (int m = 0; m < M; ++m) dots.v[r][m] = 0.0f;
  }
  for (uint column = lane % kRowLanes * W::kValues; column < inputs; column += kStride) {
    Chunk chunks[R];
    UNROLL for (int r = 0; r < R; ++r) {
      chunks[r] = weights.template load<W::kValues>(starts[r], column, inputs - column);
    }
    add_chunks<W, R, M>(chunks, x, sources, column, inputs - column, dots, params);
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int m = 0; m < M; ++m) {
      float sum = dots.v[r][m];
      UNROLL for (ushort distance = 1; distance < kRowLanes; distance *= 2) {
        sum += simd_shuffle_xor(sum, distance);
      }
      dots.v[r][m] = sum;
    }
  }
  return dots;
}

// One of the dot products, by a row and a pair that are known only at run time.
template <int R, int M>
inline float picked(Dots<R, M> dots, uint row, uint pair) {
  float value = dots.v[0][0];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int m = 0; m < M; ++m) value = row == uint(r) && pair == uint(m) ? dots.v[r][m] : value;
  }
  return value;
}
