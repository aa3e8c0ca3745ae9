// The first matmul of a few tokens' experts: gate and up rows, bias and activation; also any single matmul.
#pragma once
#include "common.h"
#include "matmul/dots.h"
#include "matmul/epilogue.h"
#include "matmul/pairs.h"
#include "router.h"
// Behind those.
#include "params/chosen.h"

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
};

// Simdgroups have blocks of their own or, with `shares`, each a share of the inputs of the threadgroup's.
inline RowsPlace rows_place(uint2 group, uint lane, uint simdgroup, uint simdgroups, bool shares) {
  if (shares) return {group.x, group.y, lane, 0, {simdgroup, kFewSimdgroups}};
  return {group.x * simdgroups + simdgroup, group.y, lane, 0, {0, 1}};
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
  const float inverse = inverse_root(norm, squares.v[0], params);
  UNROLL for (int r = 0; r < R; ++r) dots.v[r][0] *= inverse;
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

// The same for inputs that are normed, by a weight in N. Every simdgroup sums the squares of its inputs for
// itself: for one token that costs less than a launch, because memory limits the kernel.
template <typename W, int R, typename N>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows_normed(
    MATMUL_BUFFERS(typename W::Element), device const N* norm_weight [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]], LANES, uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[kFewSimdgroups * SharedSums<R>::kSize];
  const InputNorm<N> norm = {norm_weight};
  const Outputs<typename W::Element> outputs = {bias, residual, out, ids};
  RowsPlace place = rows_place(group, lane, simdgroup, simdgroups, params.shares_inputs != 0);
  place.expert = expert_of_pair(ids, group.y, params);
  rows_of_pair<W, R>(x, packed, scales, biases, norm, outputs, place, sums, params);
}

// The same for the experts that one token's logits choose. Every simdgroup chooses for itself: that costs
// less than a launch, too. The first one writes what the down projection reads. A pair behind those is of the
// shared expert. The weight of a norm is in S.
template <typename W, int R, int N, bool kNormed, typename S>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows_chosen(
    device const typename W::Element* x [[buffer(0)]], device const uchar* packed [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device int* ids [[buffer(4)]], device const uchar* bias [[buffer(5)]],
    device typename W::Element* out [[buffer(6)]], device const uchar* logits [[buffer(7)]],
    device const uchar* router_bias [[buffer(8)]], device const uchar* per_expert_scale [[buffer(9)]],
    device float* weights [[buffer(10)]], constant ChosenParams& params [[buffer(11)]],
    device const S* norm_weight [[buffer(12)]], device const uchar* shared_packed [[buffer(13)]],
    device const uchar* shared_scales [[buffer(14)]], device const uchar* shared_biases [[buffer(15)]],
    uint2 group [[threadgroup_position_in_grid]], LANES, uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  const RouterParams router = params.router;
  RowsPlace place = rows_place(group, lane, simdgroup, simdgroups, false);
  if (group.y < router.top_k) {
    Values<N> values;
    if (router.wide_logits != 0) {
      values = load_logits<N>(reinterpret_cast<device const float*>(logits), router, lane);
    } else {
      values = load_logits<N>(reinterpret_cast<device const T*>(logits), router, lane);
    }
    const bool writes = group.x == 0 && group.y == 0 && simdgroup == 0;
    const Choice<N> choice =
        choice_of<N>(values, router_bias, router, writes ? router.top_k : group.y + 1, lane);
    if (writes) choice.store(per_expert_scale, weights, ids, router, lane);
    place.expert = choice.expert_of(group.y, lane);
  } else {
    packed = shared_packed;
    scales = shared_scales;
    biases = shared_biases;
  }
  const Outputs<T, true> outputs = {bias, x, out, ids};
  if constexpr (kNormed) {
    if (params.norms_inputs != 0) {
      rows_of_pair<W, R>(x, packed, scales, biases, InputNorm<S>{norm_weight}, outputs, place, nullptr,
                         params.matmul);
      return;
    }
  }
  rows_of_pair<W, R>(x, packed, scales, biases, NoNorm{}, outputs, place, nullptr, params.matmul);
}

// Computes M pairs of one expert, of which `count` exist. `memory`: for SharedDots.
template <typename W, int R, int M, bool kSplit>
inline void rows_of_pairs(RowBlock<W, R> block, PairSet<M> pairs, uint count, threadgroup float* memory,
                          uint simdgroup, Outputs<typename W::Element> out, constant MatmulParams& params) {
  const Share share = {kSplit ? simdgroup : 0, kSplit ? uint(kFewSimdgroups) : 1};
  const Dots<R, M> dots = block.dots(sources_of(pairs, params), share, params);
  // Where a row's chunk leaves no registers; for others it takes 5 % longer on an H100.
  if constexpr (sizeof(typename W::template Chunk<W::kValues>) > 24)
    block.lane = anew(block.lane, block.lane);
  if constexpr (kSplit) {
    const SharedDots<R, M> sums(dots, memory, simdgroup, block.lane);
    if (simdgroup == 0) store_outputs<W, R, M>(block, sums, pairs, count, out, params);
  } else {
    store_outputs<W, R, M>(block, dots, pairs, count, out, params);
  }
}

// A threadgroup takes some rows of one expert and every pair that chose it, so that the rows are read from
// memory once. Its simdgroups have different rows or, with kSplit, for few threadgroups, the same rows and a
// share of the inputs each. Grid: (blocks of rows, see pairs_of_grid_row).
template <typename W, bool kSplit>
[[kernel, max_total_threads_per_threadgroup(kFewBound)]] void matmul_rows_few(
    MATMUL_BUFFERS(typename W::Element), device int* pair_order [[buffer(9)]],
    device int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int R = kFewRows, M = kFewPairs;
  const uint threads = simdgroups * kSimdWidth;
  threadgroup ushort members[kMaxFewPairs];
  constexpr uint kSumsOfTurn = kSplit ? kFewSimdgroups * SharedDots<R, M>::kSize : 1;
  threadgroup float sums[2][kSumsOfTurn];  // of even and of odd turns
  const uint count = outputs_of_rows(kRowGroups * R, params);
  const uint count_of_group = (kSplit ? 1 : simdgroups) * count;
  const uint first_of_group = group.x * count_of_group,
             first = first_of_group + (kSplit ? 0 : simdgroup * count);
  const PairList list = pairs_of_grid_row(ids, group.y, members, lane, simdgroup, params);
  if (list.count == 0) return;
  if (group.x == 0 && params.writes_tiles != 0) {
    write_tile(list, members, pair_order, tiles, thread_index, threads);
  }
  if (list.expert == params.experts) {
    const uint columns = min(params.outputs - first_of_group, count_of_group);
    for (uint i = thread_index; i < list.count * columns; i += threads) {
      out[ulong(list.at(members, i / columns)) * params.outputs + first_of_group + i % columns] = T(0.0f);
    }
    return;
  }
  if (first >= params.outputs) return;
  const W weights(packed, scales, biases, list.expert, params);
  const RowBlock<W, R> block = row_block<R>(weights, x, list.expert, first, lane, params);
  const Outputs<T> outputs = {bias, residual, out, ids};
  for (uint start = 0, turn = 0; start < list.count; ++turn) {
    const uint left = list.count - start;
    threadgroup float* memory = sums[turn % 2];
    if (left > 1) {
      const PairSet<M> pairs = list.template some<M>(members, start);
      rows_of_pairs<W, R, M, kSplit>(block, pairs, left, memory, simdgroup, outputs, params);
      start += M;
    } else {
      const PairSet<1> pair = list.template some<1>(members, start);
      rows_of_pairs<W, R, 1, kSplit>(block, pair, left, memory, simdgroup, outputs, params);
      start += 1;
    }
  }
}
