// The first matmul of a few tokens' experts: gate and up rows, bias and activation; also any single matmul.
#pragma once
#include "common.h"
#include "matmul/dots.h"
#include "matmul/epilogue.h"
#include "matmul/pairs.h"

// Stores the outputs of a block for M pairs, of which `count` exist. All eight lanes of a row have its dot
// products, and each stores some.
template <typename W, int R, int M, typename D, typename X, bool kShared>
inline void store_outputs(RowBlock<W, R, X> block, D dots, PairSet<M> pairs, uint count,
                          Outputs<typename W::Element, kShared> out, constant MatmulParams& params) {
  const uint outputs = outputs_of_rows(R, params), rows_of_output = R / outputs;
  for (uint item = block.lane % kRowLanes; item < outputs * M; item += kRowLanes) {
    const uint m = item / outputs, local = item % outputs;
    const uint output = block.first + block.lane / kRowLanes * outputs + local;
    if (m >= count || output >= params.outputs) continue;
    const float own = dots.at(rows_of_output * local, m);
    const float up = rows_of_output == 2 ? dots.at(2 * local + 1, m) : 0.0f;
    out.store(own, up, pairs.at(m), block.expert, output, params);
  }
}

template <int M>
inline Sources<M> sources_of(PairSet<M> pairs, constant MatmulParams& params) {
  Sources<M> sources;
  UNROLL for (int m = 0; m < M; ++m) sources.v[m] = input_row(pairs.v[m], params) * params.inputs;
  return sources;
}

// What a simdgroup of matmul_rows computes: a block of rows for one pair, with all inputs or a share.
struct RowsPlace {
  uint block, pair, lane, expert;
  Share share;
  float factor;  // of the inputs
};

// Simdgroups have blocks of their own or, with `shares`, each a share of the inputs of the threadgroup's.
inline RowsPlace rows_place(uint2 group, uint lane, uint simdgroup, uint simdgroups, bool shares) {
  if (shares) return {group.x, group.y, lane, 0, {simdgroup, kFewSimdgroups}, 1.0f};
  return {group.x * simdgroups + simdgroup, group.y, lane, 0, {0, 1}, 1.0f};
}

// The dot products of a simdgroup's share and, as one more row, the squares of its inputs.
template <int R>
using SharedSums = SharedDots<R + 1, 1>;

// Replaces the share of a simdgroup by the sums of all. `memory`: for SharedSums.
template <int R>
inline void add_shares(thread Dots<R, 1>& dots, thread Squares<1>& squares, threadgroup float* memory,
                       uint simdgroup, uint lane) {
  Dots<R + 1, 1> own;
  UNROLL for (int r = 0; r < R; ++r) own.v[r][0] = dots.v[r][0];
  own.v[R][0] = squares.v[0];
  const SharedSums<R> sums(own, memory, simdgroup, lane);
  UNROLL for (int r = 0; r < R; ++r) dots.v[r][0] = sums.at(r, 0);
  squares.v[0] = sums.at(R, 0);
}

template <typename W, int R, typename Norm, bool kShared>
inline void rows_of_pair(device const typename W::Element* x, device const uchar* packed,
                         device const uchar* scales, device const uchar* biases, Norm norm,
                         Outputs<typename W::Element, kShared> out, RowsPlace place,
                         threadgroup float* memory, constant MatmulParams& params) {
  typedef typename W::Element T;
  const uint pair = place.pair, expert = place.expert;
  const uint count = outputs_of_rows(kRowGroups * R, params), first = place.block * count;
  if (first >= params.outputs) return;
  if (expert == params.experts) {
    if (place.lane < min(count, params.outputs - first)) {
      out.out[ulong(pair) * params.outputs + first + place.lane] = T(0.0f);
    }
    return;
  }
  const W weights(packed, scales, biases, expert, params);
  const RowBlock<W, R> block = row_block<R>(weights, x, expert, first, place.lane, params);
  const PairSet<1> pairs = {{pair}};
  Squares<1> squares;
  Dots<R, 1> dots = block.dots(sources_of(pairs, params), norm, place.share, squares, params);
  if (place.share.count > 1) {
    add_shares<R>(dots, squares, memory, place.share.number, place.lane);
    if (place.share.number > 0) return;
  }
  const float factor = place.factor * inverse_root(norm, squares.v[0], params);
  UNROLL for (int r = 0; r < R; ++r) dots.v[r][0] *= factor;
  store_outputs<W, R, 1>(block, dots, pairs, 1, out, params);
}

inline uint expert_of_pair(device const int* ids, uint pair, constant MatmulParams& params) {
  return params.has_ids != 0 ? expert_of(ids, pair, params) : 0;
}

// Each pair reads the rows of its expert separately: good for one token, slow for many. Grid: (blocks of
// rows, pairs); with params.shares_inputs a threadgroup has one block, whose inputs its simdgroups share.
template <typename W, int R>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows(
    MATMUL_BUFFERS(typename W::Element), uint2 group [[threadgroup_position_in_grid]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[kFewSimdgroups * SharedSums<R>::kSize];
  const Outputs<typename W::Element> outputs = {bias, residual, out, ids};
  RowsPlace place = rows_place(group, lane, simdgroup, simdgroups, params.shares_inputs != 0);
  place.expert = expert_of_pair(ids, group.y, params);
  rows_of_pair<W, R>(x, packed, scales, biases, NoNorm{}, outputs, place, sums, params);
}
