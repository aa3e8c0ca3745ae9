// Gate and up with affine weights for 2 to 32 tokens. An expert's only pair takes its rows dot product by dot
// product; more pairs take them as 8x8 matrices: most of the work is to dequantise, and that does not grow
// with the pairs. Up to 8 pairs a lane has registers for twice as much of a row as beyond. Where dot products
// should end was measured on an NVIDIA H200 only (docs/speed.md).
#pragma once
#include "expert_pair.h"
#include "expert_tiles.h"

constant constexpr int kRowTiles = kMatrixRows / 8;  // an even number
constant constexpr uint kStagedInputs = 4096;        // that lie in threadgroup memory at a time, of all pairs

// A block of the inputs of an expert's pairs in threadgroup memory. Pairs 2 g and 2 g + 1 are couple g.
template <typename F>
struct StagedInputs {
  typedef typename F::Element T;
  typedef UnitInputs<T, F::kCodePairs> Unit;
  static constant constexpr bool kKnowsTotals = true;
  static constant constexpr uint kRunUnits = F::kRunUnits * 8;                        // of all rows
  static constant constexpr uint kStagedRuns = kStagedInputs / (2 * F::kRunColumns);  // a run of a couple
  // Neighbouring couples are read together: from different banks of the memory.
  static constant constexpr uint kUnitsApart = 2;
  static constant constexpr uint kMaxCouples = kMatrixPairsAtOnce / 2;
  static constant constexpr uint kZeros = kStagedRuns * kRunUnits + kMaxCouples * kUnitsApart + 4;
  static constant constexpr uint kStagedUnits = kZeros + kRunUnits;
  static constant constexpr uint kAtOnce = 4 * kMatrixSimdgroups;  // runs of a couple
  static constant constexpr int kItems = kStagedRuns / kAtOnce;
  static constant constexpr uint kStagedTotals = kStagedRuns * F::kMaxParts + kMaxCouples;

  struct Loaded {
    PairInputs<F> v[kItems];
  };

  threadgroup Unit* units;              // [couples][runs of the block][units of a run][rows of a matrix]
  threadgroup InputTotals* run_totals;  // [couples][runs of the block][parts of a run]
  F fragments;
  MatrixPlace place;
  uint couples_shift;  // of their number, a power of two
  bool has_units;      // whether the lane's row and its column are of the same part
  uint step_run;       // the first of the step

  StagedInputs(threadgroup Unit* units_, threadgroup InputTotals* totals_, F fragments_, MatrixPlace place_,
               uint couples_shift_)
      : units(units_),
        run_totals(totals_),
        fragments(fragments_),
        place(place_),
        couples_shift(couples_shift_),
        has_units(fragments.meets_inputs(place)),
        step_run(0) {}

  uint depth() const { return kStagedInputs / 2 >> couples_shift; }
  // A lane without pairs takes those of the last one that has some; its products are not stored.
  uint own_couple(int j) const {
    return min(4 * j + fragments.couple(place.quarter), (1u << couples_shift) - 1);
  }
  uint units_at(uint couple, uint run) const {
    return (couple * (kStagedRuns >> couples_shift) + run) * kRunUnits + couple * kUnitsApart;
  }
  uint totals_at(uint couple, uint run) const {
    return (couple * (kStagedRuns >> couples_shift) + run) * F::kMaxParts + couple;
  }

  RunInputs<F> run(int r, int j) const {
    const uint start = has_units ? units_at(own_couple(j), step_run + r) : kZeros;
    threadgroup const Unit* source = units + start + place.row;
    RunInputs<F> run;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) run.units[u] = source[u * 8];
    return run;
  }

  InputTotals totals(int r, int j) const {
    return run_totals[totals_at(own_couple(j), step_run + r) + fragments.part(place.quarter)];
  }

  // Once: they are read where a matrix has several parts.
  static void clear_zeros(threadgroup Unit* units, uint thread_index) {
    Unit zeros;
    UNROLL for (int i = 0; i < F::kCodePairs; ++i) zeros.v[i] = vec<T, 2>(T(0.0f));
    if (thread_index < kRunUnits) units[kZeros + thread_index] = zeros;
  }

  // Those from column `depth` on, whole steps, a run of a couple by the eight lanes of a quarter. `sources`:
  // where the pairs' inputs start.
  Loaded load(device const T* x, threadgroup const uint* sources, uint count, uint depth, uint simdgroup,
              uint inputs) const {
    Loaded loaded;
    UNROLL for (int i = 0; i < kItems; ++i) {
      const uint item = 4 * simdgroup + place.quarter + i * kAtOnce;
      const uint n = 2 * (item & ((1u << couples_shift) - 1));
      const LaneInputs<F> source(x, sources[min(n, count - 1)], sources[min(n + 1, count - 1)], n < count,
                                 n + 1 < count, place, inputs);
      loaded.v[i] = source.load(depth + (item >> couples_shift) * F::kRunColumns);
    }
    return loaded;
  }

  void stage(Loaded loaded, uint depth, uint simdgroup, uint inputs) const {
    const uint first = 4 * simdgroup + place.quarter;
    UNROLL for (int i = 0; i < kItems; ++i) {
      const uint item = first + i * kAtOnce, number = item >> couples_shift;
      const uint step = ((item - place.quarter) >> couples_shift) / F::kRuns;
      if (depth + step * F::kStep >= inputs) break;
      const uint couple = item & ((1u << couples_shift) - 1);
      const RunInputs<F> run = loaded.v[i].run();
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        units[units_at(couple, number) + u * 8 + place.row] = run.units[u];
      }
      // Row p for part p of the run.
      const T row = T(fragments.part(place.quarter) == place.row ? 1.0f : 0.0f);
      TotalSums<F> sums;
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        UNROLL for (int k = 0; k < F::kCodePairs; ++k) add_inputs(sums, k, row, run.units[u].v[k]);
      }
      const InputTotals totals = totals_of(sums);
      if (place.row < F::kMaxParts) run_totals[totals_at(couple, number) + place.row] = totals;
    }
  }
};

// Of half the pairs, rounded up to a power of two.
inline uint couples_shift_of(uint count) {
  uint shift = 0;
  while (2u << shift < count) ++shift;
  return shift;
}

// The rows of a simdgroup from output `first` on, for `count` <= 8 kPairTiles pairs.
template <typename F, int kPairTiles>
inline TileDots<kRowTiles, kPairTiles> staged_tiles(F fragments, typename F::Strips::Row expert, uint first,
                                                    device const typename F::Element* x,
                                                    threadgroup const uint* sources, uint count,
                                                    StagedInputs<F> staged, threadgroup const ushort* lanes,
                                                    MatrixPlace place, uint thread_index, uint simdgroup,
                                                    constant ExpertParams& params) {
  const uint inputs = params.inputs, block = staged.depth();
  const uint pair_tiles = (count + kTilePairs - 1) / kTilePairs;
  const RowLanes row_lanes(lanes, place);
  const ScaleLanes<F> scale_lanes(fragments, row_lanes);
  TileDots<kRowTiles, kPairTiles> dots;
  StripRows<typename F::Strips, kRowTiles> rows(first, place, params);
  rows.start(fragments.strips, expert);
  Strips<typename F::Strips, kRowTiles> strips;
  // The inputs first: they come from nearer than the rows.
  typename StagedInputs<F>::Loaded loaded = staged.load(x, sources, count, 0, simdgroup, inputs);
  strips.load(fragments.strips, rows, 0);
  for (uint depth = 0; depth < inputs; depth += block) {
    if (depth != 0) loaded = staged.load(x, sources, count, depth, simdgroup, inputs);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.stage(loaded, depth, simdgroup, inputs);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.step_run = 0;
    for (uint column = depth; column < min(depth + block, inputs); column += F::kStep) {
      const Strips<typename F::Strips, kRowTiles> now = strips.arranged(fragments, row_lanes);
      strips.load(fragments.strips, rows, column + F::kStep);
      add_step<F, kRowTiles, kPairTiles>(fragments, now, staged, pair_tiles, scale_lanes, dots);
      staged.step_run += F::kRuns;
    }
  }
  add_parts(fragments, row_lanes, dots);
  return dots;
}

template <typename T, int kPairTiles>
inline void store_tiles(TileDots<kRowTiles, kPairTiles> dots, device const uchar* bias, uint expert,
                        uint first, threadgroup const ushort* pairs, uint count, StoredPairs own,
                        MatrixPlace place, device T* out, constant ExpertParams& params) {
  const bool plain = params.row_layout == ROWS_PLAIN;
  for (uint n = own.first; n < count; n = own.next(n)) {
    for (int t = 0; t < kRowTiles; t += plain ? 1 : 2) {
      const uint output = tile_output(first, t, place, params);
      if (output >= params.outputs) break;
      const float up = plain ? 0.0f : dots.of(t + 1, n);
      out[ulong(pairs[n]) * params.outputs + output] =
          T(finished_output(dots.of(t, n), up, bias, expert, output, params));
    }
  }
}

// What the threadgroup's simdgroups share.
template <typename U>
struct RowsMemory {
  threadgroup const ushort* pairs;
  threadgroup const uint* sources;
  threadgroup const ushort* lanes;
  threadgroup U* units;
  threadgroup InputTotals* totals;
};

// What a threadgroup takes of a unit's rows: of the first units two blocks, of the middle ones, which have
// about the last kLastBlocks blocks of the grid, one. Of the last units, which have kHalvedBlocks of these,
// it is half a block where there is a single pair. So the threadgroups end at about the same time. A unit has
// one row of the grid, two or four; a row is as long as half the blocks.
struct UnitBlocks {
  uint unit;
  uint first;  // block
  uint count;
  uint first_half;  // half block, for a single pair
  uint halves;

  UnitBlocks(uint2 group, constant ExpertParams& params) {
    constexpr uint kRows = kMatrixSimdgroups * kMatrixRows;
    const uint blocks = (params.rows + kRows - 1) / kRows;
    uint row = group.y, shift = 0;
    unit = 0;
    if (row >= params.long_units) {
      row -= params.long_units;
      unit = params.long_units;
      shift = 1;
      if (row >= 2 * params.middle_units) {
        row -= 2 * params.middle_units;
        unit += params.middle_units;
        shift = 2;
      }
    }
    unit += row >> shift;
    const uint number = group.x + (row & ((1u << shift) - 1)) * ((blocks + 1) / 2);
    halves = 4 >> shift;
    first_half = number * halves;
    first = shift == 0 ? 2 * number : number;
    count = first < blocks ? min(shift == 0 ? 2u : 1u, blocks - first) : 0;
  }
};

// The blocks of rows for `count` <= 8 kPairTiles pairs of an expert, from number `start` on.
template <typename F, int kPairTiles>
inline void matrix_rows(F fragments, typename F::Strips::Row expert, uint number, UnitBlocks blocks,
                        device const typename F::Element* x, uint start, uint count,
                        RowsMemory<typename StagedInputs<F>::Unit> memory, MatrixPlace place,
                        device const uchar* bias, device typename F::Element* out, uint thread_index,
                        uint simdgroup, constant ExpertParams& params) {
  const uint own = outputs_of_rows(kMatrixRows, params);
  for (uint block = blocks.first; block < blocks.first + blocks.count; ++block) {
    const uint first = (block * kMatrixSimdgroups + simdgroup) * own;
    // Here, since made before the loop it took registers: 36 bytes in local memory (NVRTC).
    const StagedInputs<F> staged(memory.units, memory.totals, fragments, place, couples_shift_of(count));
    const TileDots<kRowTiles, kPairTiles> dots =
        staged_tiles<F, kPairTiles>(fragments, expert, first, x, memory.sources + start, count, staged,
                                    memory.lanes, place, thread_index, simdgroup, params);
    store_tiles(dots, bias, number, first, memory.pairs + start, count, stored_pairs(fragments, place), place,
                out, params);
  }
}

// For the grid see UnitBlocks. W and S are the same format.
template <typename W, typename S>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_rows_matrix(
    EXPERT_ROWS_BUFFERS(typename W::Element), device uint4* order [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  constexpr uint kThreads = kMatrixSimdgroups * kSimdWidth;
  threadgroup ushort pairs[kMaxMatrixPairs];
  threadgroup uint sources[kMaxMatrixPairs];
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  typedef UnitInputs<T, S::kCodePairs> Unit;
  typedef StagedInputs<FewFragments<S>> FewInputs;
  typedef StagedInputs<ManyFragments<typename S::OneLoad>> ManyInputs;
  static_assert(FewInputs::kStagedUnits >= ManyInputs::kStagedUnits, "one memory for both");
  static_assert(FewInputs::kStagedTotals >= ManyInputs::kStagedTotals, "one memory for both");
  static_assert(FewInputs::kStagedUnits * sizeof(Unit) >= LoneInputs<W>::kColumns * 4,
                "and for a single pair");
  threadgroup vec<float, 4> inputs[(FewInputs::kStagedUnits * sizeof(Unit) + 15) / 16];
  threadgroup vec<float, 2> part_sums[kThreads];
  threadgroup InputTotals totals[FewInputs::kStagedTotals];

  const uint block = outputs_of_rows(kMatrixSimdgroups * kMatrixRows, params);
  const UnitBlocks blocks(group, params);
  const PairList list = pairs_of_unit(ids, pairs, order, out, blocks.unit, blocks.first, block, thread_index,
                                      kThreads, lane, simdgroup, params);
  if (list.count == 0) return;
  if (list.count == 1) {
    const W weights(packed, scales, biases, list.expert, params);
    const uint own = outputs_of_rows(blocks.halves * (kMatrixRows / 2), params);
    const uint first = blocks.first_half * (block / 2) + simdgroup * own;
    rows_of_pair(weights, x, LoneInputs<W>{inputs, part_sums}, list, first, own, thread_index, lane, bias,
                 out, params);
    return;
  }
  for (uint i = thread_index; i < list.count; i += kThreads) {
    sources[i] = input_row(pairs[i], params) * params.inputs;
  }
  const RowsMemory<Unit> memory = {pairs, sources, lanes, reinterpret_cast<threadgroup Unit*>(inputs),
                                   totals};
  FewInputs::clear_zeros(memory.units, thread_index);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const S strips(place.quarter, params);
  const FewFragments<S> few(strips);
  if (list.count <= few.tile_pairs()) {
    matrix_rows<FewFragments<S>, 1>(few, strips.expert(packed, scales, biases, list.expert), list.expert,
                                    blocks, x, 0, list.count, memory, place, bias, out, thread_index,
                                    simdgroup, params);
    return;
  }
  if (list.count <= kTilePairs) {
    const ManyFragments<S> tile(strips);
    matrix_rows<ManyFragments<S>, 1>(tile, strips.expert(packed, scales, biases, list.expert), list.expert,
                                     blocks, x, 0, list.count, memory, place, bias, out, thread_index,
                                     simdgroup, params);
    return;
  }
  typedef typename S::OneLoad ManyStrips;
  const ManyStrips many_strips(place.quarter, params);
  const ManyFragments<ManyStrips> many(many_strips);
  for (uint start = 0; start < list.count; start += kMatrixPairsAtOnce) {
    const uint count = min(list.count - start, kMatrixPairsAtOnce);
    matrix_rows<ManyFragments<ManyStrips>, kMaxPairTiles>(
        many, many_strips.expert(packed, scales, biases, list.expert), list.expert, blocks, x, start, count,
        memory, place, bias, out, thread_index, simdgroup, params);
  }
}
