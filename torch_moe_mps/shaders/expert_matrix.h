// Expert matmuls with affine weights for 2 to 32 tokens. An expert's only pair takes its rows dot product by
// dot product, as for one token; more pairs take them as 8x8 matrices, of which one serves 8 pairs: most of
// the work is to dequantise, and that does not grow with the pairs. Where dot products should end was
// measured on an NVIDIA H200 only (docs/speed.md).
#pragma once
#include "expert_decode.h"
#include "expert_fragments.h"

constant constexpr int kRowTiles = kMatrixRows / 8;  // an even number
constant constexpr int kDownTiles = kMatrixDownRows / 8;
constant constexpr uint kTilePairs = 8;  // whose inputs are the columns of one matrix
constant constexpr int kMaxPairTiles = kMatrixPairsAtOnce / kTilePairs;
constant constexpr uint kStagedInputs = 4096;  // that lie in threadgroup memory at a time, of all pairs

template <typename T>
inline void multiply_pairs(thread simdgroup_matrix<float, 8, 8>& sums, vec<T, 2> weights, vec<T, 2> inputs) {
  simdgroup_matrix<T, 8, 8> a, b;
  own_elements(a) = weights;
  own_elements(b) = inputs;
  simdgroup_multiply_accumulate(sums, a, b, sums);
}

// Dot products of kTiles x 8 rows with kPairTiles x 8 pairs: a lane holds those of its rows and of two pairs
// of each tile.
template <int kTiles, int kPairTiles>
struct TileDots {
  vec<float, 2> v[kTiles][kPairTiles];

  TileDots() {
    UNROLL for (int t = 0; t < kTiles; ++t) {
      UNROLL for (int j = 0; j < kPairTiles; ++j) v[t][j] = vec<float, 2>(0.0f);
    }
  }

  // That of a tile and pair n, one of the lane's. An array with such indices would go to memory.
  float of(int tile, uint n) const {
    vec<float, 2> found = v[0][0];
    UNROLL for (int t = 0; t < kTiles; ++t) {
      UNROLL for (int j = 0; j < kPairTiles; ++j) {
        if (tile == t && n / kTilePairs == uint(j)) found = v[t][j];
      }
    }
    return n % 2 == 0 ? found.x : found.y;
  }
};

// The next of a lane's pairs: those of quarter q are 8 j + 2 q and the one after it, for each tile j.
inline uint next_pair(uint n) {
  return n % 2 == 0 ? n + 1 : n + kTilePairs - 1;
}

// The units between which the scale does not change, for one tile of pairs.
template <typename F>
struct RunInputs {
  UnitInputs<typename F::Element, F::kCodePairs> units[F::kRunUnits];
};

// The inputs of two pairs for a run as they are loaded. A conversion next to a load would wait for it, so
// they are put side by side only when they are used.
template <typename F>
struct PairInputs {
  typedef vec<typename F::Element, F::kCodePairs> Source;
  Source first[F::kRunUnits];
  Source second[F::kRunUnits];

  RunInputs<F> run() const {
    RunInputs<F> run;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
      UNROLL for (int i = 0; i < F::kCodePairs; ++i) {
        run.units[u].v[i] = vec<typename F::Element, 2>(first[u][i], second[u][i]);
      }
    }
    return run;
  }
};

// The inputs of two pairs as a lane meets them: its own in the units of quarter 0, and up to which column.
template <typename F>
struct LaneInputs {
  typedef typename F::Element T;
  device const T* first;
  device const T* second;
  uint first_end;
  uint second_end;

  LaneInputs() {}
  LaneInputs(device const T* first_, device const T* second_, bool has_first, bool has_second,
             MatrixPlace place, uint inputs) {
    const uint offset = F::unit_column(0, place.row / 2) + place.row % 2 * F::kCodePairs;
    first = first_ + offset;
    second = second_ + offset;
    first_end = has_first ? inputs : 0;
    second_end = has_second ? inputs : 0;
  }

  // Of the run at `column`: zero for a pair that is not there, and beyond the inputs.
  PairInputs<F> load(uint column) const {
    typedef typename PairInputs<F>::Source Source;
    PairInputs<F> pairs;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) pairs.first[u] = pairs.second[u] = Source(T(0.0f));
    if (column < first_end) {
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        pairs.first[u] = *reinterpret_cast<device const Source*>(first + (column + F::unit_column(u, 0)));
      }
    }
    if (column < second_end) {
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        pairs.second[u] = *reinterpret_cast<device const Source*>(second + (column + F::unit_column(u, 0)));
      }
    }
    return pairs;
  }
};

// A row of ones times the inputs puts their sums where the products of the pairs are.
template <typename F>
inline InputTotals input_totals(RunInputs<F> run) {
  typedef typename F::Element T;
  InputTotals totals = {vec<float, 2>(0.0f), vec<float, 2>(0.0f)};
  UNROLL for (int place = 0; place < F::kMantissaPlaces; ++place) {
    simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
      UNROLL for (int i = place; i < F::kCodePairs; i += F::kMantissaPlaces) {
        multiply_pairs<T>(sums, vec<T, 2>(T(1.0f)), run.units[u].v[i]);
      }
    }
    const vec<float, 2> plain = own_elements(sums);
    totals.plain += plain;
    if constexpr (F::kHasOffsets) totals.less_offset -= F::offset(place) * plain;
  }
  return totals;
}

// The lanes that have the scales (0) and the biases (1) of a lane's row, for each run of a step.
template <typename F>
struct ScaleLanes {
  ushort v[2][F::kRuns];

  ScaleLanes(F fragments, threadgroup const ushort* lanes, MatrixPlace place) {
    UNROLL for (int kind = 0; kind < 2; ++kind) {
      UNROLL for (int r = 0; r < F::kRuns; ++r) {
        v[kind][r] = lanes[4 * place.row + fragments.scale_quarter(r, kind)];
      }
    }
  }
};

// One step. `inputs.run(r, j)` is run r for tile j of `pair_tiles`, `inputs.totals` its totals.
template <typename F, int kTiles, int kPairTiles, typename I>
inline void add_step(F fragments, thread typename F::Strip* strips, thread I& inputs, uint pair_tiles,
                     ScaleLanes<F> scale_lanes, thread TileDots<kTiles, kPairTiles>& dots) {
  typedef typename F::Element T;
  UNROLL for (int r = 0; r < F::kRuns; ++r) {
    UNROLL for (int j = 0; j < kPairTiles; ++j) {
      if (j != 0 && uint(j) >= pair_tiles) continue;
      const RunInputs<F> run = inputs.run(r, j);
      const InputTotals totals = inputs.totals(r, j, run);
      simdgroup_matrix<float, 8, 8> sums[kTiles];
      UNROLL for (int t = 0; t < kTiles; ++t) own_elements(sums[t]) = totals.less_offset;
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        UNROLL for (int i = 0; i < F::kCodePairs; ++i) {
          UNROLL for (int t = 0; t < kTiles; ++t) {
            multiply_pairs<T>(sums[t], fragments.pair(strips[t], r * F::kRunUnits + u, i), run.units[u].v[i]);
          }
        }
      }
      UNROLL for (int t = 0; t < kTiles; ++t) {
        fragments.add_scaled(strips[t], r, scale_lanes.v[0][r], scale_lanes.v[1][r], own_elements(sums[t]),
                             totals, dots.v[t][j]);
      }
    }
  }
}

// The output of a lane's row in tile t of a block from output `first` on. Tiles 2 i and 2 i + 1 are the gates
// and the ups of the same outputs; where there are no gates, all are outputs.
inline uint tile_output(uint first, int t, MatrixPlace place, constant ExpertParams& params) {
  return first + place.row + 8 * (params.row_layout == ROWS_PLAIN ? t : t / 2);
}

// A lane's strips of kTiles x 8 rows, one step after another, the next ones loaded ahead.
template <typename F, int kTiles>
struct Strips {
  uint numbers[kTiles];  // of the rows
  typename F::Row rows[kTiles];
  typename F::Strip now[kTiles];
  typename F::Strip next[kTiles];

  // Past the last output the rows are those of the last: read, not stored.
  Strips(uint first, MatrixPlace place, constant ExpertParams& params) {
    const typename F::Strip none = {};
    UNROLL for (int t = 0; t < kTiles; ++t) {
      const uint output = min(tile_output(first, t, place, params), params.outputs - 1);
      numbers[t] = weight_row(output, t % 2, params);
      next[t] = none;
    }
  }

  void start(F fragments, typename F::Row expert) {
    UNROLL for (int t = 0; t < kTiles; ++t) rows[t] = fragments.at(expert, numbers[t]);
  }

  void load(F fragments, uint column) {
    UNROLL for (int t = 0; t < kTiles; ++t) next[t] = fragments.load(next[t], rows[t], column);
  }

  void take() { UNROLL for (int t = 0; t < kTiles; ++t) now[t] = next[t]; }
};

// A block of the inputs of an expert's pairs in threadgroup memory. Pairs 2 g and 2 g + 1 are couple g: the
// pairs of one lane, of quarter g % 4 and tile g / 4.
template <typename F>
struct StagedInputs {
  typedef UnitInputs<typename F::Element, F::kCodePairs> Unit;
  static constant constexpr uint kStagedRuns = kStagedInputs / (2 * F::kRunColumns);  // a run of a couple
  static constant constexpr uint kStagedUnits = kStagedRuns * F::kRunUnits * 8;

  threadgroup Unit* units;              // [couples][runs of the block][units of a run][rows of a matrix]
  threadgroup InputTotals* run_totals;  // [couples][runs of the block]
  uint couples_shift;                   // of their number, a power of two
  MatrixPlace place;
  uint step_run;  // the first of the step

  uint depth() const { return kStagedInputs / 2 >> couples_shift; }
  // A lane without pairs takes those of the last one that has some; its products are not stored.
  uint staged_run(int r, int j) const {
    const uint couple = min(4 * j + place.quarter, (1u << couples_shift) - 1);
    return couple * (kStagedRuns >> couples_shift) + step_run + r;
  }

  RunInputs<F> run(int r, int j) const {
    threadgroup const Unit* source = units + staged_run(r, j) * (F::kRunUnits * 8) + place.row;
    RunInputs<F> run;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) run.units[u] = source[u * 8];
    return run;
  }

  InputTotals totals(int r, int j, RunInputs<F>) const { return run_totals[staged_run(r, j)]; }

  // Those from column `depth` on, whole steps, a run of a couple by the eight lanes of a quarter; what a
  // simdgroup takes is loaded before the first is used. `sources`: where the pairs' inputs start.
  void stage(device const typename F::Element* x, threadgroup const uint* sources, uint count, uint depth,
             uint simdgroup, uint inputs) const {
    constexpr uint kAtOnce = 4 * kMatrixSimdgroups;
    constexpr int kItems = kStagedRuns / kAtOnce;
    const uint first = 4 * simdgroup + place.quarter;
    PairInputs<F> loaded[kItems];
    UNROLL for (int i = 0; i < kItems; ++i) {
      const uint item = first + i * kAtOnce;
      const uint n = 2 * (item & ((1u << couples_shift) - 1));
      const LaneInputs<F> source(x + sources[min(n, count - 1)], x + sources[min(n + 1, count - 1)],
                                 n < count, n + 1 < count, place, inputs);
      loaded[i] = source.load(depth + (item >> couples_shift) * F::kRunColumns);
    }
    UNROLL for (int i = 0; i < kItems; ++i) {
      const uint item = first + i * kAtOnce, number = item >> couples_shift;
      const uint step = ((item - place.quarter) >> couples_shift) / F::kRuns;
      if (depth + step * F::kStep >= inputs) break;
      const uint target = (item - (number << couples_shift)) * (kStagedRuns >> couples_shift) + number;
      const RunInputs<F> run = loaded[i].run();
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        units[(target * F::kRunUnits + u) * 8 + place.row] = run.units[u];
      }
      const InputTotals totals = input_totals<F>(run);
      if (place.row == 0) run_totals[target] = totals;
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
inline TileDots<kRowTiles, kPairTiles> staged_tiles(F fragments, typename F::Row expert, uint first,
                                                    device const typename F::Element* x,
                                                    threadgroup const uint* sources, uint count,
                                                    StagedInputs<F> staged, threadgroup const ushort* lanes,
                                                    MatrixPlace place, uint simdgroup,
                                                    constant ExpertParams& params) {
  const uint inputs = params.inputs, block = staged.depth();
  const uint pair_tiles = (count + kTilePairs - 1) / kTilePairs;
  const ScaleLanes<F> scale_lanes(fragments, lanes, place);
  TileDots<kRowTiles, kPairTiles> dots;
  Strips<F, kRowTiles> strips(first, place, params);
  strips.start(fragments, expert);
  strips.load(fragments, 0);
  for (uint depth = 0; depth < inputs; depth += block) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.stage(x, sources, count, depth, simdgroup, inputs);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.step_run = 0;
    for (uint column = depth; column < min(depth + block, inputs); column += F::kStep) {
      strips.take();
      strips.load(fragments, column + F::kStep);
      add_step<F, kRowTiles, kPairTiles>(fragments, strips.now, staged, pair_tiles, scale_lanes, dots);
      staged.step_run += F::kRuns;
    }
  }
  return dots;
}

template <typename T, int kPairTiles>
inline void store_tiles(TileDots<kRowTiles, kPairTiles> dots, device const uchar* bias, uint expert,
                        uint first, threadgroup const ushort* pairs, uint count, MatrixPlace place,
                        device T* out, constant ExpertParams& params) {
  const bool plain = params.row_layout == ROWS_PLAIN;
  for (uint n = 2 * place.quarter; n < count; n = next_pair(n)) {
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
template <typename F>
struct RowsMemory {
  threadgroup const ushort* pairs;
  threadgroup const uint* sources;
  threadgroup const ushort* lanes;
  threadgroup UnitInputs<typename F::Element, F::kCodePairs>* units;
  threadgroup InputTotals* totals;
};

// `count` <= 8 kPairTiles pairs of an expert, from number `start` on.
template <typename F, int kPairTiles>
inline void matrix_rows(F fragments, typename F::Row expert, uint number, uint first,
                        device const typename F::Element* x, uint start, uint count, RowsMemory<F> memory,
                        MatrixPlace place, device const uchar* bias, device typename F::Element* out,
                        uint simdgroup, constant ExpertParams& params) {
  const StagedInputs<F> staged = {memory.units, memory.totals, couples_shift_of(count), place, 0};
  const TileDots<kRowTiles, kPairTiles> dots =
      staged_tiles<F, kPairTiles>(fragments, expert, first, x, memory.sources + start, count, staged,
                                  memory.lanes, place, simdgroup, params);
  store_tiles(dots, bias, number, first, memory.pairs + start, count, place, out, params);
}

// All pairs of an expert.
template <typename F>
inline void matrix_rows_of_pairs(F fragments, typename F::Row expert, PairList list, uint first,
                                 device const typename F::Element* x, RowsMemory<F> memory, MatrixPlace place,
                                 device const uchar* bias, device typename F::Element* out, uint simdgroup,
                                 constant ExpertParams& params) {
  if (list.count <= kTilePairs) {
    matrix_rows<F, 1>(fragments, expert, list.expert, first, x, 0, list.count, memory, place, bias, out,
                      simdgroup, params);
    return;
  }
  for (uint start = 0; start < list.count; start += kMatrixPairsAtOnce) {
    const uint count = min(list.count - start, kMatrixPairsAtOnce);
    matrix_rows<F, kMaxPairTiles>(fragments, expert, list.expert, first, x, start, count, memory, place, bias,
                                  out, simdgroup, params);
  }
}

constant constexpr int kRowsAtOnce = 8;  // of an expert's only pair

// Its outputs, those of a simdgroup from `first` on.
template <typename W>
inline void rows_of_pair(W weights, device const typename W::Element* x, PairList list, uint first, uint lane,
                         device const uchar* bias, device typename W::Element* out,
                         constant ExpertParams& params) {
  const Sources<1> source = {{input_row(list.first, params) * params.inputs}};
  for (uint block = 0; block < kMatrixRows; block += kRowsAtOnce) {
    const uint output = first + outputs_of_rows(block, params);
    if (output >= params.outputs) return;
    const RowSet<kRowsAtOnce> rows = rows_at<kRowsAtOnce>(output, 0, params);
    const RowValues<kRowsAtOnce> values =
        expert_rows<W, kRowsAtOnce, 1>(weights, rows, x, source, 1, lane, params);
    store_outputs_of_pair(values, bias, list.expert, output, list.first, lane, out, params);
  }
}

// Grid: see pairs_of_expert. W and F are the same format.
template <typename W, typename F>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_rows_matrix(
    EXPERT_ROWS_BUFFERS(typename W::Element), device uint4* order [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  constexpr uint kThreads = kMatrixSimdgroups * kSimdWidth;
  threadgroup ushort pairs[kMaxMatrixPairs];
  threadgroup uint sources[kMaxMatrixPairs];
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  threadgroup UnitInputs<T, F::kCodePairs> units[StagedInputs<F>::kStagedUnits];
  threadgroup InputTotals totals[StagedInputs<F>::kStagedRuns];

  const uint block = outputs_of_rows(kMatrixSimdgroups * kMatrixRows, params);
  const PairList list = pairs_of_expert(ids, pairs, order, out, block, group, groups, thread_index, kThreads,
                                        lane, simdgroup, params);
  if (list.count == 0) return;
  const uint first = group.x * block + simdgroup * outputs_of_rows(kMatrixRows, params);
  if (list.count == 1) {
    if (first >= params.outputs) return;
    const W weights(packed, scales, biases, list.expert, params);
    rows_of_pair(weights, x, list, first, lane, bias, out, params);
    return;
  }
  for (uint i = thread_index; i < list.count; i += kThreads) {
    sources[i] = input_row(pairs[i], params) * params.inputs;
  }
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const RowsMemory<F> memory = {pairs, sources, lanes, units, totals};
  const F fragments(place.quarter, params);
  const typename F::Row expert = fragments.expert(packed, scales, biases, list.expert);
  matrix_rows_of_pairs(fragments, expert, list, first, x, memory, place, bias, out, simdgroup, params);
}

// A simdgroup's part of an expert's columns: of every `stride` / kStep steps one, from `column` on.
struct Part {
  uint column;
  uint stride;
};

// Inputs straight from memory, for a simdgroup that has an expert of its own. Those of a single tile of pairs
// are loaded a run ahead; more would not fit into registers.
template <typename F, int kPairTiles>
struct DirectInputs {
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

  InputTotals totals(int, int, RunInputs<F> run) const { return input_totals<F>(run); }
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
inline TileDots<kDownTiles, kPairTiles> direct_tiles(F fragments, thread Strips<F, kDownTiles>& strips,
                                                     Part part, bool has_following, typename F::Row following,
                                                     device const typename F::Element* x, Entries entries,
                                                     ScaleLanes<F> scale_lanes, MatrixPlace place,
                                                     constant ExpertParams& params) {
  const uint inputs = params.inputs, last = entries.count - 1;
  const uint pair_tiles = (entries.count + kTilePairs - 1) / kTilePairs;
  DirectInputs<F, kPairTiles> direct;
  UNROLL for (int j = 0; j < kPairTiles; ++j) {
    const uint n = kTilePairs * j + 2 * place.quarter;
    direct.sources[j] =
        LaneInputs<F>(x + entries.at[min(n, last)].x * inputs, x + entries.at[min(n + 1, last)].x * inputs,
                      n < entries.count, n + 1 < entries.count, place, inputs);
  }
  TileDots<kDownTiles, kPairTiles> dots;
  direct.start(part);
  for (uint column = part.column; column < inputs; column += part.stride) {
    uint ahead = column + part.stride;
    if (ahead >= inputs && has_following) {
      strips.start(fragments, following);
      ahead = 0;
    }
    strips.take();
    strips.load(fragments, ahead);
    direct.column = column;
    add_step<F, kDownTiles, kPairTiles>(fragments, strips.now, direct, pair_tiles, scale_lanes, dots);
  }
  return dots;
}

// Adds the dot products of a part of the columns to the terms of the pairs; the last part makes them the
// terms: with the bias, times the routing weights.
template <int kPairTiles>
inline void add_terms(TileDots<kDownTiles, kPairTiles> dots, bool is_first, bool is_last, uint first,
                      Entries entries, threadgroup float* terms, MatrixPlace place,
                      device const uchar* routing, device const uchar* bias,
                      constant ExpertDownParams& params) {
  for (uint n = 2 * place.quarter; n < entries.count; n = next_pair(n)) {
    const uint pair = entries.at[n].x;
    UNROLL for (int t = 0; t < kDownTiles; ++t) {
      const uint row = min(tile_output(first, t, place, params.matmul), params.matmul.outputs - 1);
      threadgroup float& term = terms[pair * kMatrixDownRows + 8 * t + place.row];
      const float dot = is_first ? dots.of(t, n) : term + dots.of(t, n);
      term = is_last ? weighted(dot, pair, entries.expert, row, routing, bias, params) : dot;
    }
  }
}

// Whether an entry of the order is the first of an expert's pairs, or of those that are taken at once.
inline bool starts_expert(device const uint4* order, uint entry, constant ExpertParams& params) {
  if (entry >= params.pairs) return false;
  const uint4 own = order[entry];
  return own.y < params.experts && own.z % kMatrixPairsAtOnce == 0;
}

inline Entries entries_from(device const uint4* start) {
  const uint4 head = *start;
  return {start, min(head.w - head.z, kMatrixPairsAtOnce), head.y};
}

// What a simdgroup takes of the order: every kMatrixDownSimdgroups-th of the distinct experts, each with all
// its pairs.
struct OwnEntries {
  device const uint4* order;
  uint base;    // the first of the entries that are looked at next
  uint before;  // experts before them
  uint left;    // of those looked at last, the ones that are the simdgroup's

  Entries next(uint lane, uint simdgroup, constant ExpertParams& params) {
    while (left == 0 && base < params.pairs) {
      const bool starts = starts_expert(order, base + lane, params);
      const uint all = ballot(starts);
      const uint number = before + popcount(all & ((1u << lane) - 1));
      left = ballot(starts && number % kMatrixDownSimdgroups == simdgroup);
      before += popcount(all);
      base += kSimdWidth;
    }
    if (left == 0) return {order, 0, 0};
    const Entries entries = entries_from(order + (base - kSimdWidth + ctz(left)));
    left &= left - 1;
    return entries;
  }
};

// A threadgroup takes kMatrixDownRows rows, its simdgroups in turn the distinct experts of `order`, each with
// all its pairs. Grid: blocks of rows. Threadgroup memory: kMatrixDownRows floats a pair.
template <typename F>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_down_matrix(
    EXPERT_DOWN_FEW_BUFFERS(typename F::Element), uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename F::Element T;
  constexpr uint kThreads = kMatrixDownSimdgroups * kSimdWidth;
  constexpr Part kWhole = {0, F::kStep};
  constant ExpertParams& matmul = params.matmul;
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  const uint first = group * kMatrixDownRows;
  clear_sentinels<kMatrixDownRows>(ids, terms, thread_index, kThreads, matmul);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  OwnEntries own = {order, 0, 0, 0};
  Entries entries = own.next(lane, simdgroup, matmul);
  const F fragments(place.quarter, matmul);
  const ScaleLanes<F> scale_lanes(fragments, lanes, place);
  Strips<F, kDownTiles> strips(first, place, matmul);
  if (entries.count != 0) {
    strips.start(fragments, fragments.expert(packed, scales, biases, entries.expert));
    strips.load(fragments, 0);
  }
  while (entries.count != 0) {
    const Entries more = own.next(lane, simdgroup, matmul);
    const typename F::Row following = fragments.expert(packed, scales, biases, more.expert);
    if (entries.count <= kTilePairs) {
      const TileDots<kDownTiles, 1> dots = direct_tiles<F, 1>(
          fragments, strips, kWhole, more.count != 0, following, x, entries, scale_lanes, place, matmul);
      add_terms(dots, true, true, first, entries, terms, place, routing, bias, params);
    } else {
      const TileDots<kDownTiles, kMaxPairTiles> dots = direct_tiles<F, kMaxPairTiles>(
          fragments, strips, kWhole, more.count != 0, following, x, entries, scale_lanes, place, matmul);
      add_terms(dots, true, true, first, entries, terms, place, routing, bias, params);
    }
    entries = more;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T, kMatrixDownRows>(terms, first, shared_gate, shared_out, residual, out, thread_index,
                                     kThreads, params);
}

// How many simdgroups, as a power of two, each of so few experts can have that there are at least as many
// simdgroups.
inline uint parts_of_expert(device const uint4* order, uint lane, constant ExpertParams& params) {
  uint experts = 0, parts = 1;
  for (uint base = 0; base < params.pairs; base += kSimdWidth) {
    experts += popcount(ballot(starts_expert(order, base + lane, params)));
  }
  while (experts != 0 && 2 * parts * experts <= kMatrixDownSimdgroups) parts *= 2;
  return parts;
}

// The same for so few experts that several simdgroups can share each: one takes every so many a step of its
// columns. At most kMatrixDownSimdgroups entries may start an expert.
template <typename F>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_down_parts(
    EXPERT_DOWN_FEW_BUFFERS(typename F::Element), uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename F::Element T;
  constexpr uint kThreads = kMatrixDownSimdgroups * kSimdWidth;
  constant ExpertParams& matmul = params.matmul;
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  const uint first = group * kMatrixDownRows;
  clear_sentinels<kMatrixDownRows>(ids, terms, thread_index, kThreads, matmul);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const uint parts = parts_of_expert(order, lane, matmul), own_part = simdgroup % parts;
  OwnEntries own = {order, 0, 0, 0};
  const Entries entries = own.next(lane, simdgroup / parts, matmul);
  const F fragments(place.quarter, matmul);
  const ScaleLanes<F> scale_lanes(fragments, lanes, place);
  const Part part = {own_part * F::kStep, parts * F::kStep};
  const typename F::Row expert = fragments.expert(packed, scales, biases, entries.expert);
  TileDots<kDownTiles, kMaxPairTiles> dots;
  if (entries.count != 0) {
    Strips<F, kDownTiles> strips(first, place, matmul);
    strips.start(fragments, expert);
    strips.load(fragments, part.column);
    if (entries.count <= kTilePairs) {
      const TileDots<kDownTiles, 1> few =
          direct_tiles<F, 1>(fragments, strips, part, false, expert, x, entries, scale_lanes, place, matmul);
      UNROLL for (int t = 0; t < kDownTiles; ++t) dots.v[t][0] = few.v[t][0];
    } else {
      dots = direct_tiles<F, kMaxPairTiles>(fragments, strips, part, false, expert, x, entries, scale_lanes,
                                            place, matmul);
    }
  }
  // In turn, so that the sums always have the same order.
  for (uint turn = 0; turn < parts; ++turn) {
    if (turn == own_part) {
      add_terms(dots, turn == 0, turn + 1 == parts, first, entries, terms, place, routing, bias, params);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_combined<T, kMatrixDownRows>(terms, first, shared_gate, shared_out, residual, out, thread_index,
                                     kThreads, params);
}
