// Rows of a matrix times the inputs of a few pairs, by one simdgroup.
//
// Eight lanes share a row and stride over its chunks, so that short rows leave few lanes idle; the simdgroup
// has four such groups of lanes, each with R neighbouring rows. A lane loads the inputs of a chunk once for
// its R rows, and each byte of a row once for M pairs.
#pragma once
#include "matmul/formats.h"

constant constexpr uint kRowGroups = kRowGroupsOfSimdgroup;
constant constexpr uint kRowLanes = kSimdWidth / kRowGroups;

// Where the rows of a lane begin.
template <typename W, int R>
struct LaneRows {
  typename W::Row v[R];
};

// The offsets in x, in elements, at which the inputs of M pairs start.
template <int M>
struct Sources {
  uint v[M];
};

template <int R, int M>
struct Dots {
  float v[R][M];

  // One of the dot products, by a row and a pair that are known only at run time. With ?: in place of
  // select(), compilers choose between addresses, and the dot products are in memory.
  float at(uint row, uint pair) const {
    float value = v[0][0];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int m = 0; m < M; ++m) {
        value = select(value, v[r][m], row == uint(r) && pair == uint(m));
      }
    }
    return value;
  }
};

// The sums of squares of the inputs of M pairs.
template <int M>
struct Squares {
  float v[M];
};

// An RMSNorm of the inputs on their way into dot products: these get input * weight, and the squares of the
// inputs are summed beside them.
template <typename T>
struct InputNorm {
  device const T* weight;
};
struct NoNorm {};

// The share of a simdgroup in the inputs: all of them, or each `count`-th chunk of its lanes.
struct Share {
  uint number, count;
};

// Dot products with M pairs of which each simdgroup of a threadgroup has a share: in threadgroup memory,
// where the shares are added.
template <int R, int M>
struct SharedDots {
  static constant constexpr uint kSize = kRowGroups * R * M;  // of a simdgroup

  threadgroup float* shares;

  // `memory`: kSize for each simdgroup. Not to be written again before the next barrier.
  SharedDots(Dots<R, M> own, threadgroup float* memory, uint simdgroup, uint lane)
      : shares(memory + lane / kRowLanes * R * M) {
    if (lane % kRowLanes == 0) {
      threadgroup float* target = shares + simdgroup * kSize;
      UNROLL for (int r = 0; r < R; ++r) {
        UNROLL for (int m = 0; m < M; ++m) target[r * M + m] = own.v[r][m];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // One of the lane's dot products.
  float at(uint row, uint pair) const {
    float sum = 0.0f;
    UNROLL for (uint share = 0; share < kFewSimdgroups; ++share) {
      sum += shares[share * kSize + row * M + pair];
    }
    return sum;
  }
};

// The rows of a lane in a block of kRowGroups * R rows whose first output is `first`; gate and up rows
// alternate. Past the last output the rows of the last one are read again, and their results are not stored.
template <typename W, int R>
inline LaneRows<W, R> rows_of_lane(W weights, uint first, uint lane, constant MatmulParams& params) {
  LaneRows<W, R> rows;
  UNROLL for (int r = 0; r < R; ++r) {
    const uint local = lane / kRowLanes * R + r;
    const uint output = min(first + outputs_of_rows(local, params), params.outputs - 1);
    rows.v[r] = weights.row(weight_row(output, local % 2, params));
  }
  return rows;
}

// Norms some inputs but for the division by their root mean square.
template <typename T, int M, int N>
inline void norm_inputs(InputNorm<T> norm, thread Pack<N>* inputs, thread Squares<M>& squares, uint column,
                        uint left, bool vectorised, constant MatmulParams& params) {
  const auto weight = load_elements<N>(norm.weight + column, left, vectorised);
  UNROLL for (int i = 0; i < N; ++i) {
    const float factor = weight.at(i) + params.norm_weight_offset;
    UNROLL for (int m = 0; m < M; ++m) {
      const float x = inputs[m].v[i];
      squares.v[m] = fma(x, x, squares.v[m]);
      inputs[m].v[i] = x * factor;
    }
  }
}
template <int M, int N>
inline void norm_inputs(NoNorm, thread Pack<N>*, thread Squares<M>&, uint, uint, bool,
                        constant MatmulParams&) {}

// The sum over the eight lanes that share a row.
inline float sum_of_lanes(float sum) {
  UNROLL for (ushort distance = 1; distance < kRowLanes; distance *= 2) {
    sum += simd_shuffle_xor(sum, distance);
  }
  return sum;
}

template <typename T, int M>
inline void sum_squares(InputNorm<T>, thread Squares<M>& squares) {
  UNROLL for (int m = 0; m < M; ++m) squares.v[m] = sum_of_lanes(squares.v[m]);
}
template <int M>
inline void sum_squares(NoNorm, thread Squares<M>&) {}

template <typename T>
inline float inverse_root(InputNorm<T>, float squares, constant MatmulParams& params) {
  return precise::rsqrt(squares / float(params.inputs) + params.norm_eps);
}
inline float inverse_root(NoNorm, float, constant MatmulParams&) {
  return 1.0f;
}

// Adds the products of a chunk of R rows with the inputs of M pairs. The codes themselves are multiplied; a
// scale is applied once for its group.
template <typename W, int R, int M, typename Norm, typename C, typename X>
inline void add_chunks(thread C* chunks, device const X* x, Sources<M> sources, Norm norm, uint column,
                       uint left, thread Dots<R, M>& dots, thread Squares<M>& squares,
                       constant MatmulParams& params) {
  constexpr int kPackSize = W::kPackSize;
  const bool vectorised = W::kAnyLength ? params.vectorised != 0 : true;
  constexpr int kPacks = W::kValues / kPackSize / W::kGroups;  // of a group
  UNROLL for (int group = 0; group < W::kGroups; ++group) {
    Dots<R, M> coded;
    InputSums sums[M];
    UNROLL for (int m = 0; m < M; ++m) {
      sums[m].v[0] = sums[m].v[1] = 0.0f;
      UNROLL for (int r = 0; r < R; ++r) coded.v[r][m] = 0.0f;
    }
    UNROLL for (int pack = group * kPacks; pack < (group + 1) * kPacks; ++pack) {
      Pack<kPackSize> inputs[M];
      const uint start = W::kAnyLength ? min(uint(pack * kPackSize), left) : pack * kPackSize;
      UNROLL for (int m = 0; m < M; ++m) {
        const auto loaded =
            load_elements<kPackSize>(x + sources.v[m] + column + start, left - start, vectorised);
        UNROLL for (int i = 0; i < kPackSize; ++i) inputs[m].v[i] = loaded.at(i);
      }
      norm_inputs(norm, inputs, squares, column + start, left - start, vectorised, params);
      UNROLL for (int m = 0; m < M; ++m) {
        W::add_inputs(inputs[m], sums[m]);
        UNROLL for (int r = 0; r < R && kPacks == 1; ++r) coded.v[r][m] = -W::excess(sums[m]);
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
        if (kPacks > 1) coded.v[r][m] -= W::excess(sums[m]);
        W::add_dot(chunks[r], group, coded.v[r][m], sums[m], dots.v[r][m]);
      }
    }
  }
}

// The dot products of a lane's R rows with a share of the inputs of M pairs, and with a norm the squares of
// these inputs, by whose inverse root the products are still to be multiplied. All eight lanes that have the
// rows get them.
template <typename W, int R, int M, typename Norm, typename X>
inline Dots<R, M> row_dots(W weights, LaneRows<W, R> rows, device const X* x, Sources<M> sources, Norm norm,
                           Share share, thread Squares<M>& squares, uint lane,
                           constant MatmulParams& params) {
  typedef typename W::template Chunk<W::kValues> Chunk;
  constexpr uint kStep = kRowLanes * W::kValues;
  const uint inputs = params.inputs, first = share.number * kStep + lane % kRowLanes * W::kValues;
  Dots<R, M> dots;
  UNROLL for (int m = 0; m < M; ++m) {
    squares.v[m] = 0.0f;
    UNROLL for (int r = 0; r < R; ++r) dots.v[r][m] = 0.0f;
  }
  for (uint column = first; column < inputs; column += share.count * kStep) {
    Chunk chunks[R];
    UNROLL for (int r = 0; r < R; ++r) {
      chunks[r] = weights.template load<W::kValues>(rows.v[r], column, inputs - column);
    }
    add_chunks<W, R, M>(chunks, x, sources, norm, column, inputs - column, dots, squares, params);
  }
  UNROLL for (int m = 0; m < M; ++m) {
    UNROLL for (int r = 0; r < R; ++r) dots.v[r][m] = sum_of_lanes(dots.v[r][m]);
  }
  sum_squares(norm, squares);
  return dots;
}

// A block of kRowGroups * R rows of one expert's matrix, by a simdgroup: what a lane has of it. Inputs are in
// X.
template <typename W, int R, typename X = typename W::Element>
struct RowBlock {
  W weights;
  device const X* x;
  LaneRows<W, R> rows;
  uint expert;
  uint first;  // the block's first output
  uint lane;

  template <int M, typename Norm>
  Dots<R, M> dots(Sources<M> sources, Norm norm, Share share, thread Squares<M>& squares,
                  constant MatmulParams& params) const {
    return row_dots<W, R, M>(weights, rows, x, sources, norm, share, squares, lane, params);
  }
  template <int M>
  Dots<R, M> dots(Sources<M> sources, Share share, constant MatmulParams& params) const {
    Squares<M> none;
    return dots(sources, NoNorm{}, share, none, params);
  }
};

template <int R, typename W, typename X>
inline RowBlock<W, R, X> row_block(W weights, device const X* x, uint expert, uint first, uint lane,
                                   constant MatmulParams& params) {
  return {weights, x, rows_of_lane<W, R>(weights, first, lane, params), expert, first, lane};
}
