// The down projection with affine weights for 2 to 32 tokens, all pairs by 8x8 matrices, and the sum over a
// token's experts.
#pragma once
#include "expert_tiles.h"

constant constexpr int kDownTiles = kMatrixDownRows / 8;

// A simdgroup's part of an expert's columns: of every `stride` / kStep steps one, from `column` on.
struct Part {
  uint column;
  uint stride;
};

// Inputs straight from memory, for a simdgroup that has an expert of its own. Those of a single tile of pairs
// are loaded a run ahead; more would not fit into registers.
template <typename F, int kPairTiles>
struct DirectInputs {
  static constant constexpr bool kKnowsTotals = false;
  static constant constexpr bool kAhead = kPairTiles == 1;

  LaneInputs<F> sources[kPairTiles];
  uint column;
  uint stride;  // to the next one
  PairInputs<F> next;

  void start(Part part) {
    stride = part.stride;
    if constexpr (kAhead) next = sources[0].load(part.column);
  }

  RunInputs<F> run(int r, int j) {
    const uint start = column + r * F::kRunColumns;
    if constexpr (!kAhead) return sources[j].load(start).run();
    const RunInputs<F> now = next.run();
    next = sources[j].load(r + 1 == F::kRuns ? column + stride : start + F::kRunColumns);
    return now;
  }
};

// Some of the pairs of one expert: neighbours in the order.
struct Entries {
  device const uint4* at;
  uint count;  // at most 8 kMaxPairTiles; 0: none
  uint expert;
};

// kMatrixDownRows rows of an expert. The last step already loads the first one of the expert that follows, if
// there is one.
template <typename F, int kPairTiles>
inline TileDots<kDownTiles, kPairTiles> direct_tiles(
    F fragments, thread StripRows<typename F::Strips, kDownTiles>& rows,
    thread Strips<typename F::Strips, kDownTiles>& strips, Part part, bool has_following,
    typename F::Strips::Row following, device const typename F::Element* x, Entries entries, RowLanes lanes,
    MatrixPlace place, constant ExpertParams& params) {
  const uint inputs = params.inputs, last = entries.count - 1;
  const uint pair_tiles = (entries.count + kTilePairs - 1) / kTilePairs;
  const bool has_inputs = fragments.meets_inputs(place);
  const ScaleLanes<F> scale_lanes(fragments, lanes);
  DirectInputs<F, kPairTiles> direct;
  UNROLL for (int j = 0; j < kPairTiles; ++j) {
    const uint n = kTilePairs * j + 2 * fragments.couple(place.quarter);
    direct.sources[j] =
        LaneInputs<F>(x, entries.at[min(n, last)].x * inputs, entries.at[min(n + 1, last)].x * inputs,
                      has_inputs && n < entries.count, has_inputs && n + 1 < entries.count, place, inputs);
  }
  TileDots<kDownTiles, kPairTiles> dots;
  direct.start(part);
  for (uint column = part.column; column < inputs; column += part.stride) {
    uint ahead = column + part.stride;
    const Strips<typename F::Strips, kDownTiles> now = strips.arranged(fragments, lanes);
    if (ahead >= inputs && has_following) {
      rows.start(fragments.strips, following);
      ahead = 0;
    }
    direct.column = column;
    strips.load(fragments.strips, rows, ahead);
    add_step<F, kDownTiles, kPairTiles>(fragments, now, direct, pair_tiles, scale_lanes, dots);
  }
  add_parts(fragments, lanes, dots);
  return dots;
}

// Adds the dot products of a part of the columns to those of the pairs.
template <int kPairTiles>
inline void add_dots(TileDots<kDownTiles, kPairTiles> dots, bool is_first, Entries entries,
                     PairTerms<kMatrixDownRows> terms, StoredPairs own, MatrixPlace place) {
  for (uint n = own.first; n < entries.count; n = own.next(n)) {
    const uint pair = entries.at[n].x;
    UNROLL for (int t = 0; t < kDownTiles; ++t) {
      threadgroup float& term = terms.at(pair, 8 * t + place.row);
      term = is_first ? dots.of(t, n) : term + dots.of(t, n);
    }
  }
}

// The distinct experts of the order, each with all its pairs or as many as are taken at once: those with few
// pairs from the front of `v`, those with many from its back.
struct Heads {
  threadgroup uint2* v;  // (entry + pairs << 16, expert)
  uint few;
  uint many;

  Entries entries(device const uint4* order, uint number) const {
    const uint2 head = v[number < few ? number : kMaxMatrixPairs - 1 - (number - few)];
    return {order + (head.x & 0xffff), head.x >> 16, head.y};
  }
};

// For the whole threadgroup, which waits before they are read. `heads`: kMaxMatrixPairs elements.
template <typename S>
inline Heads find_heads(device const uint4* order, threadgroup uint2* heads, uint lane, uint simdgroup,
                        constant ExpertParams& params) {
  const uint few_pairs = FewFragments<S>(S(0, params)).tile_pairs();
  constexpr int kAtOnce = 4;  // loads in flight together
  const uint lower = (1u << lane) - 1;
  Heads found = {heads, 0, 0};
  for (uint start = 0; start < params.pairs; start += kAtOnce * kSimdWidth) {
    uint4 owns[kAtOnce];
    UNROLL for (int i = 0; i < kAtOnce; ++i) owns[i] =
        order[min(start + i * kSimdWidth + lane, params.pairs - 1)];
    UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const uint entry = start + i * kSimdWidth + lane;
      const uint4 own = owns[i];
      const bool starts = entry < params.pairs && own.y < params.experts && own.z % kMatrixPairsAtOnce == 0;
      const bool is_few = own.w <= few_pairs;
      const uint few = ballot(starts && is_few), many = ballot(starts && !is_few);
      if (simdgroup == 0 && starts) {
        const uint number = is_few ? found.few + popcount(few & lower)
                                   : kMaxMatrixPairs - 1 - (found.many + popcount(many & lower));
        heads[number] = uint2(entry + (min(own.w - own.z, kMatrixPairsAtOnce) << 16), own.y);
      }
      found.few += popcount(few);
      found.many += popcount(many);
    }
  }
  return found;
}

// What the simdgroups of a down projection have in common.
template <typename S>
struct DownBlock {
  S format;
  device const typename S::Element* x;
  device const uchar* packed;
  device const uchar* scales;
  device const uchar* biases;
  PairTerms<kMatrixDownRows> terms;
  uint first;  // row

  typename S::Row expert(uint number) const { return format.expert(packed, scales, biases, number); }
};

// Which of the heads a simdgroup takes: every kMatrixDownSimdgroups-th. Simdgroups that have one more with
// many pairs than others leave the first kManyTurns turns of those with few to the others: one with many
// takes about as long.
constant constexpr uint kManyTurns = 2;
struct Turns {
  uint simdgroup;
  uint first;
  uint others;  // simdgroups that take the first turns
  uint all;     // from this head on every simdgroup takes its turn

  static Turns of_many(Heads heads, uint simdgroup) { return {simdgroup, heads.few + simdgroup, 0, 0}; }

  static Turns of_few(Heads heads, uint simdgroup) {
    const uint busy = heads.many % kMatrixDownSimdgroups, others = kMatrixDownSimdgroups - busy;
    const uint all = kManyTurns * others;
    return {simdgroup, simdgroup < busy ? all + simdgroup : simdgroup - busy, others, all};
  }

  uint next(uint number) const {
    if (number >= all) return number + kMatrixDownSimdgroups;
    return number + others < all ? number + others : all + simdgroup;
  }
};

// The dot products of a simdgroup's experts up to head `end`.
template <typename F, int kPairTiles>
inline void down_of_experts(F fragments, DownBlock<typename F::Strips> block, device const uint4* order,
                            Heads heads, Turns turns, uint end, RowLanes lanes, MatrixPlace place,
                            constant ExpertParams& params) {
  typedef typename F::Strips S;
  constexpr Part kWhole = {0, S::kStep};
  if (turns.first >= end) return;
  Entries entries = heads.entries(order, turns.first);
  StripRows<S, kDownTiles> rows(block.first, place, params);
  Strips<S, kDownTiles> strips;
  rows.start(block.format, block.expert(entries.expert));
  strips.load(block.format, rows, 0);
  for (uint number = turns.first, next; number < end; number = next) {
    next = turns.next(number);
    const bool has_more = next < end;
    const Entries more = heads.entries(order, has_more ? next : number);
    const TileDots<kDownTiles, kPairTiles> dots =
        direct_tiles<F, kPairTiles>(fragments, rows, strips, kWhole, has_more, block.expert(more.expert),
                                    block.x, entries, lanes, place, params);
    add_dots(dots, true, entries, block.terms, stored_by_first(fragments, place), place);
    entries = more;
  }
}

// How many simdgroups, as a power of two, each of so few experts can have.
inline uint parts_of_expert(uint experts) {
  uint parts = 1;
  while (experts != 0 && 2 * parts * experts <= kPartsSimdgroups) parts *= 2;
  return parts;
}

// So few experts that several simdgroups can share each: one takes every so many a step of its columns. At
// most kPartsSimdgroups entries may start an expert.
template <typename S>
inline void share_experts(FewFragments<S> few, ManyFragments<S> many, DownBlock<S> block,
                          device const uint4* order, Heads heads, RowLanes lanes, MatrixPlace place,
                          uint simdgroup, constant ExpertParams& params) {
  const uint experts = heads.few + heads.many, parts = parts_of_expert(experts);
  const uint own_part = simdgroup % parts, number = simdgroup / parts;
  Entries entries = {order, 0, 0};
  if (number < experts) entries = heads.entries(order, number);
  const Part part = {own_part * S::kStep, parts * S::kStep};
  const typename S::Row expert = block.expert(entries.expert);
  TileDots<kDownTiles, kMaxPairTiles> dots;
  StoredPairs own = stored_by_first(many, place);
  if (entries.count != 0) {
    StripRows<S, kDownTiles> rows(block.first, place, params);
    Strips<S, kDownTiles> strips;
    rows.start(block.format, expert);
    strips.load(block.format, rows, part.column);
    if (entries.count <= few.tile_pairs()) {
      const TileDots<kDownTiles, 1> tile = direct_tiles<FewFragments<S>, 1>(
          few, rows, strips, part, false, expert, block.x, entries, lanes, place, params);
      UNROLL for (int t = 0; t < kDownTiles; ++t) dots.v[t][0] = tile.v[t][0];
      own = stored_by_first(few, place);
    } else {
      dots = direct_tiles<ManyFragments<S>, kMaxPairTiles>(many, rows, strips, part, false, expert, block.x,
                                                           entries, lanes, place, params);
    }
  }
  // In turn, so that the sums always have the same order.
  for (uint turn = 0; turn < parts; ++turn) {
    if (turn != 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (turn == own_part) add_dots(dots, turn == 0, entries, block.terms, own, place);
  }
}

// A threadgroup takes kMatrixDownRows rows, its simdgroups the distinct experts of `order`, each with all its
// pairs. kShares: see share_experts; otherwise the simdgroups take them in turn, first those with few pairs,
// so that they do not share registers with those with many. Grid: blocks of rows. Threadgroup memory:
// kMatrixDownRows + 1 floats a pair.
template <typename S, uint kSimdgroups, bool kShares>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups* kSimdWidth)]] void expert_down_matrix(
    EXPERT_DOWN_FEW_BUFFERS(typename S::Element), uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename S::Element T;
  constexpr uint kThreads = kSimdgroups * kSimdWidth;
  constant ExpertParams& matmul = params.matmul;
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  threadgroup uint2 starts[kMaxMatrixPairs];
  const uint first = group * kMatrixDownRows;
  const Heads heads = find_heads<S>(order, starts, lane, simdgroup, matmul);
  const PairTerms<kMatrixDownRows> terms(memory, matmul.pairs);
  terms.start(ids, routing, thread_index, kThreads, params);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);  // waits
  const RowLanes row_lanes(lanes, place);
  const DownBlock<S> block = {S(place.quarter, matmul), x, packed, scales, biases, terms, first};
  const FewFragments<S> few(block.format);
  const ManyFragments<S> many(block.format);
  if constexpr (kShares) {
    share_experts<S>(few, many, block, order, heads, row_lanes, place, simdgroup, matmul);
  } else {
    down_of_experts<FewFragments<S>, 1>(few, block, order, heads, Turns::of_few(heads, simdgroup), heads.few,
                                        row_lanes, place, matmul);
    down_of_experts<ManyFragments<S>, kMaxPairTiles>(many, block, order, heads,
                                                     Turns::of_many(heads, simdgroup), heads.few + heads.many,
                                                     row_lanes, place, matmul);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T, kMatrixDownRows>(terms, first, ids, bias, shared_gate, shared_out, residual, out,
                                     thread_index, kThreads, params);
}
