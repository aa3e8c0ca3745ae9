// Expert matmuls with affine weights for 2 to 32 tokens. An expert's only pair takes its rows dot product by
// dot product, as for one token; more pairs take them as 8x8 matrices, of which one serves 8 pairs: most of
// the work is to dequantise, and that does not grow with the pairs. Where dot products should end was
// measured on an NVIDIA H200 only (docs/speed.md).
#pragma once
#include "expert_decode.h"
#include "expert_fragments.h"

constant constexpr int kRowTiles = kMatrixRows / 8;  // an even number
constant constexpr uint kTilePairs = 8;              // whose inputs are the columns of one matrix
constant constexpr int kMaxPairTiles = 4;            // at once: more pairs read the rows again
constant constexpr uint kStagedInputs = 4096;        // that lie in threadgroup memory at a time, of all pairs

template <typename T>
inline void multiply_pairs(thread simdgroup_matrix<float, 8, 8>& sums, vec<T, 2> weights, vec<T, 2> inputs) {
  simdgroup_matrix<T, 8, 8> a, b;
  own_elements(a) = weights;
  own_elements(b) = inputs;
  simdgroup_multiply_accumulate(sums, a, b, sums);
}

// Dot products of kRowTiles x 8 rows with kPairTiles x 8 pairs: a lane holds those of its rows and of two
// pairs of each tile.
template <int kPairTiles>
struct TileDots {
  vec<float, 2> v[kRowTiles][kPairTiles];

  TileDots() {
    UNROLL for (int t = 0; t < kRowTiles; ++t) {
      UNROLL for (int j = 0; j < kPairTiles; ++j) v[t][j] = vec<float, 2>(0.0f);
    }
  }

  // That of a tile and pair n, one of the lane's. An array with such indices would go to memory.
  float of(int tile, uint n) const {
    vec<float, 2> found = v[0][0];
    UNROLL for (int t = 0; t < kRowTiles; ++t) {
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
    first_end = has_first ? inputs - offset : 0;
    second_end = has_second ? inputs - offset : 0;
  }

  // Zero for a pair that is not there, and beyond the inputs.
  UnitInputs<T, F::kCodePairs> unit(uint column) const {
    typedef vec<T, F::kCodePairs> Source;
    Source a = Source(T(0.0f)), b = Source(T(0.0f));
    if (column < first_end) a = *reinterpret_cast<device const Source*>(first + column);
    if (column < second_end) b = *reinterpret_cast<device const Source*>(second + column);
    UnitInputs<T, F::kCodePairs> unit;
    UNROLL for (int i = 0; i < F::kCodePairs; ++i) unit.v[i] = vec<T, 2>(a[i], b[i]);
    return unit;
  }
};

// The units between which the scale does not change, for one tile of pairs.
template <typename F>
struct RunInputs {
  UnitInputs<typename F::Element, F::kCodePairs> units[F::kRunUnits];
};

// A row of ones times the inputs puts their sums where the products of the pairs are.
template <typename F, int kUnits>
inline InputTotals input_totals(thread const UnitInputs<typename F::Element, F::kCodePairs>* units) {
  typedef typename F::Element T;
  InputTotals totals = {vec<float, 2>(0.0f), vec<float, 2>(0.0f)};
  UNROLL for (int place = 0; place < F::kMantissaPlaces; ++place) {
    simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int u = 0; u < kUnits; ++u) {
      UNROLL for (int i = place; i < F::kCodePairs; i += F::kMantissaPlaces) {
        multiply_pairs<T>(sums, vec<T, 2>(T(1.0f)), units[u].v[i]);
      }
    }
    const vec<float, 2> plain = own_elements(sums);
    totals.plain += plain;
    if constexpr (F::kHasOffsets) totals.offset += F::offset(place) * plain;
  }
  return totals;
}

// One step. `inputs.run(r, j)` are the units of a run for tile j of `pair_tiles`, `inputs.totals` their
// totals.
template <typename F, int kPairTiles, typename I>
inline void add_step(F fragments, thread typename F::Strip* strips, I inputs, uint pair_tiles,
                     ushort4 scale_lanes, thread TileDots<kPairTiles>& dots) {
  typedef typename F::Element T;
  UNROLL for (int r = 0; r < F::kUnits / F::kRunUnits; ++r) {
    UNROLL for (int j = 0; j < kPairTiles; ++j) {
      if (j != 0 && uint(j) >= pair_tiles) continue;
      const RunInputs<F> run = inputs.run(r, j);
      const InputTotals totals = inputs.totals(r, j, run);
      simdgroup_matrix<float, 8, 8> sums[kRowTiles];
      UNROLL for (int t = 0; t < kRowTiles; ++t) {
        own_elements(sums[t]) = F::kHasOffsets ? -totals.offset : vec<float, 2>(0.0f);
      }
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        UNROLL for (int i = 0; i < F::kCodePairs; ++i) {
          UNROLL for (int t = 0; t < kRowTiles; ++t) {
            multiply_pairs<T>(sums[t], fragments.pair(strips[t], r * F::kRunUnits + u, i), run.units[u].v[i]);
          }
        }
      }
      UNROLL for (int t = 0; t < kRowTiles; ++t) {
        fragments.add_scaled(strips[t], scale_lanes[r], own_elements(sums[t]), totals, dots.v[t][j]);
      }
    }
  }
}

// The lanes that have the scales of a lane's row, for each run of a step.
template <typename F>
inline ushort4 lanes_of_scales(F fragments, threadgroup const ushort* lanes, MatrixPlace place) {
  ushort4 found = ushort4(0);
  UNROLL for (int r = 0; r < F::kUnits / F::kRunUnits; ++r) {
    found[r] = lanes[4 * place.row + fragments.run_quarter(r)];
  }
  return found;
}

// The output of a lane's row in tile t of a block from output `first` on. Tiles 2 i and 2 i + 1 are the gates
// and the ups of the same outputs; where there are no gates, all are outputs.
inline uint tile_output(uint first, int t, MatrixPlace place, constant ExpertParams& params) {
  return first + place.row + 8 * (params.row_layout == ROWS_PLAIN ? t : t / 2);
}

template <typename F>
struct TileRows {
  typename F::Row v[kRowTiles];
};

// Past the last output they are those of the last: read, not stored.
template <typename F>
inline TileRows<F> tile_rows(F fragments, uint first, MatrixPlace place, constant ExpertParams& params) {
  TileRows<F> rows;
  UNROLL for (int t = 0; t < kRowTiles; ++t) {
    const uint output = min(tile_output(first, t, place, params), params.outputs - 1);
    rows.v[t] = fragments.at(weight_row(output, t % 2, params), place.quarter);
  }
  return rows;
}

// The strips of one step after another, the next ones loaded ahead.
template <typename F>
struct Strips {
  TileRows<F> rows;
  uint quarter;
  typename F::Strip now[kRowTiles];
  typename F::Strip next[kRowTiles];

  Strips(F fragments, TileRows<F> rows_, uint quarter_) : rows(rows_), quarter(quarter_) {
    load(fragments, 0);
  }

  void load(F fragments, uint column) {
    UNROLL for (int t = 0; t < kRowTiles; ++t) next[t] = fragments.load(rows.v[t], column, quarter);
  }

  void advance(F fragments, uint column) {
    UNROLL for (int t = 0; t < kRowTiles; ++t) now[t] = next[t];
    load(fragments, column + F::kStep);
  }
};

// A block of the inputs of an expert's pairs in threadgroup memory. Pairs 2 g and 2 g + 1 are couple g: the
// pairs of one lane, of quarter g % 4 and tile g / 4.
template <typename F>
struct StagedInputs {
  typedef typename F::Element T;
  static constant constexpr uint kUnitColumns = F::kStep / F::kUnits;
  static constant constexpr uint kStagedUnits = kStagedInputs / (2 * kUnitColumns);  // a unit of a couple

  threadgroup UnitInputs<T, F::kCodePairs>* units;  // [couples][units of the block][rows of a matrix]
  threadgroup InputTotals* unit_totals;             // [couples][units of the block]
  uint couples;                                     // a power of two
  MatrixPlace place;
  uint step_unit;  // the first of the step

  uint depth() const { return kStagedInputs / 2 / couples; }
  // A lane without pairs takes those of the last one that has some; its products are not stored.
  uint staged_unit(int unit, int j) const {
    return min(4 * j + place.quarter, couples - 1) * (kStagedUnits / couples) + step_unit + unit;
  }

  RunInputs<F> run(int r, int j) const {
    RunInputs<F> inputs;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
      inputs.units[u] = units[staged_unit(r * F::kRunUnits + u, j) * 8 + place.row];
    }
    return inputs;
  }

  InputTotals totals(int r, int j, RunInputs<F>) const {
    InputTotals totals = unit_totals[staged_unit(r * F::kRunUnits, j)];
    UNROLL for (int u = 1; u < F::kRunUnits; ++u) {
      const InputTotals unit = unit_totals[staged_unit(r * F::kRunUnits + u, j)];
      totals.plain += unit.plain;
      totals.offset += unit.offset;
    }
    return totals;
  }

  // Those from column `depth` on, a unit of a couple by the eight lanes of a quarter. `sources`: where the
  // pairs' inputs start.
  void stage(device const T* x, threadgroup const uint* sources, uint count, uint depth, uint simdgroup,
             uint inputs) const {
    for (uint item = 4 * simdgroup + place.quarter; item < kStagedUnits; item += 4 * kMatrixSimdgroups) {
      const uint couple = item % couples, unit = item / couples;
      const uint n = 2 * couple, target = couple * (kStagedUnits / couples) + unit;
      const LaneInputs<F> source(x + sources[min(n, count - 1)], x + sources[min(n + 1, count - 1)],
                                 n < count, n + 1 < count, place, inputs);
      const uint column = depth + unit / F::kUnits * F::kStep + F::unit_column(unit % F::kUnits, 0);
      const UnitInputs<T, F::kCodePairs> loaded = source.unit(column);
      units[target * 8 + place.row] = loaded;
      const InputTotals totals = input_totals<F, 1>(&loaded);
      if (place.row == 0) unit_totals[target] = totals;
    }
  }
};

// The number of couples, rounded up to a power of two.
inline uint couples_of(uint count) {
  uint couples = 1;
  while (2 * couples < count) couples *= 2;
  return couples;
}

// The rows of a simdgroup from output `first` on, for `count` <= 8 kPairTiles pairs.
template <typename F, int kPairTiles>
inline TileDots<kPairTiles> staged_tiles(F fragments, uint first, device const typename F::Element* x,
                                         threadgroup const uint* sources, uint count, StagedInputs<F> staged,
                                         threadgroup const ushort* lanes, MatrixPlace place, uint simdgroup,
                                         constant ExpertParams& params) {
  const uint inputs = params.inputs, block = staged.depth();
  const uint pair_tiles = (count + kTilePairs - 1) / kTilePairs;
  const ushort4 scale_lanes = lanes_of_scales(fragments, lanes, place);
  TileDots<kPairTiles> dots;
  Strips<F> strips(fragments, tile_rows(fragments, first, place, params), place.quarter);
  for (uint depth = 0; depth < inputs; depth += block) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.stage(x, sources, count, depth, simdgroup, inputs);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.step_unit = 0;
    for (uint column = depth; column < min(depth + block, inputs); column += F::kStep) {
      strips.advance(fragments, column);
      add_step<F, kPairTiles>(fragments, strips.now, staged, pair_tiles, scale_lanes, dots);
      staged.step_unit += F::kUnits;
    }
  }
  return dots;
}

template <typename T, int kPairTiles>
inline void store_tiles(TileDots<kPairTiles> dots, device const uchar* bias, uint expert, uint first,
                        threadgroup const ushort* pairs, uint count, MatrixPlace place, device T* out,
                        constant ExpertParams& params) {
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
inline void matrix_rows(F fragments, uint expert, uint first, device const typename F::Element* x, uint start,
                        uint count, RowsMemory<F> memory, MatrixPlace place, device const uchar* bias,
                        device typename F::Element* out, uint simdgroup, constant ExpertParams& params) {
  const StagedInputs<F> staged = {memory.units, memory.totals, couples_of(count), place, 0};
  const TileDots<kPairTiles> dots = staged_tiles<F, kPairTiles>(
      fragments, first, x, memory.sources + start, count, staged, memory.lanes, place, simdgroup, params);
  store_tiles(dots, bias, expert, first, memory.pairs + start, count, place, out, params);
}

// All pairs of an expert.
template <typename F>
inline void matrix_rows_of_pairs(F fragments, PairList list, uint first, device const typename F::Element* x,
                                 RowsMemory<F> memory, MatrixPlace place, device const uchar* bias,
                                 device typename F::Element* out, uint simdgroup,
                                 constant ExpertParams& params) {
  if (list.count <= kTilePairs) {
    matrix_rows<F, 1>(fragments, list.expert, first, x, 0, list.count, memory, place, bias, out, simdgroup,
                      params);
    return;
  }
  for (uint start = 0; start < list.count; start += kMaxPairTiles * kTilePairs) {
    const uint count = min(list.count - start, kMaxPairTiles * kTilePairs);
    matrix_rows<F, kMaxPairTiles>(fragments, list.expert, first, x, start, count, memory, place, bias, out,
                                  simdgroup, params);
  }
}

// An expert's only pair: the rows of a simdgroup, 8 at a time.
template <typename W>
inline RowValues<kMatrixRows> rows_of_pair(W weights, device const typename W::Element* x, uint source,
                                           uint first, uint lane, constant ExpertParams& params) {
  const Sources<1> sources = {{source}};
  return row_blocks<W, kMatrixRows, 8, 1>(weights, x, sources, 1, first, lane, params);
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
  threadgroup uint found[kMatrixSimdgroups];
  threadgroup uint lower[kMatrixSimdgroups];
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  threadgroup UnitInputs<T, F::kCodePairs> units[StagedInputs<F>::kStagedUnits * 8];
  threadgroup InputTotals totals[StagedInputs<F>::kStagedUnits];

  const uint block = outputs_of_rows(kMatrixSimdgroups * kMatrixRows, params);
  const PairList list = pairs_of_expert(ids, pairs, found, lower, order, out, block, group, groups,
                                        thread_index, kThreads, lane, simdgroup, params);
  if (list.count == 0) return;
  const uint first = group.x * block + simdgroup * outputs_of_rows(kMatrixRows, params);
  if (list.count == 1) {
    if (first >= params.outputs) return;
    const W weights(packed, scales, biases, list.expert, params);
    const uint source = input_row(pairs[0], params) * params.inputs;
    store_outputs_of_pair(rows_of_pair(weights, x, source, first, lane, params), bias, list.expert, first,
                          pairs[0], lane, out, params);
    return;
  }
  for (uint i = thread_index; i < list.count; i += kThreads) {
    sources[i] = input_row(pairs[i], params) * params.inputs;
  }
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const RowsMemory<F> memory = {pairs, sources, lanes, units, totals};
  const F fragments(packed, scales, biases, list.expert, params);
  matrix_rows_of_pairs(fragments, list, first, x, memory, place, bias, out, simdgroup, params);
}

// The inputs of one step straight from memory, for a simdgroup that has an expert of its own. Those of a
// single tile of pairs are loaded a step ahead; more would not fit into registers.
template <typename F, int kPairTiles>
struct DirectInputs {
  static constant constexpr int kRuns = F::kUnits / F::kRunUnits;
  static constant constexpr bool kAhead = kPairTiles == 1;

  LaneInputs<F> sources[kPairTiles];
  uint column;
  RunInputs<F> now[kAhead ? kRuns : 1];
  RunInputs<F> next[kAhead ? kRuns : 1];

  RunInputs<F> load(uint step, int r, int j) const {
    RunInputs<F> inputs;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
      inputs.units[u] = sources[j].unit(step + F::unit_column(r * F::kRunUnits + u, 0));
    }
    return inputs;
  }

  void start() {
    if constexpr (kAhead) {
      UNROLL for (int r = 0; r < kRuns; ++r) next[r] = load(0, r, 0);
    }
  }

  void advance(uint step) {
    column = step;
    if constexpr (kAhead) {
      UNROLL for (int r = 0; r < kRuns; ++r) now[r] = next[r];
      UNROLL for (int r = 0; r < kRuns; ++r) next[r] = load(step + F::kStep, r, 0);
    }
  }

  RunInputs<F> run(int r, int j) const {
    if constexpr (kAhead) return now[r];
    return load(column, r, j);
  }

  InputTotals totals(int, int, RunInputs<F> run) const { return input_totals<F, F::kRunUnits>(run.units); }
};

// kMatrixRows rows of an expert for `count` <= 8 kPairTiles pairs, those of `entries` of the order.
template <typename F, int kPairTiles>
inline TileDots<kPairTiles> direct_tiles(F fragments, uint first, device const typename F::Element* x,
                                         device const uint4* entries, uint count,
                                         threadgroup const ushort* lanes, MatrixPlace place,
                                         constant ExpertParams& params) {
  const uint inputs = params.inputs, last = count - 1;
  const uint pair_tiles = (count + kTilePairs - 1) / kTilePairs;
  const ushort4 scale_lanes = lanes_of_scales(fragments, lanes, place);
  DirectInputs<F, kPairTiles> direct;
  UNROLL for (int j = 0; j < kPairTiles; ++j) {
    const uint n = kTilePairs * j + 2 * place.quarter;
    direct.sources[j] =
        LaneInputs<F>(x + entries[min(n, last)].x * inputs, x + entries[min(n + 1, last)].x * inputs,
                      n < count, n + 1 < count, place, inputs);
  }
  TileDots<kPairTiles> dots;
  Strips<F> strips(fragments, tile_rows(fragments, first, place, params), place.quarter);
  direct.start();
  for (uint column = 0; column < inputs; column += F::kStep) {
    strips.advance(fragments, column);
    direct.advance(column);
    add_step<F, kPairTiles>(fragments, strips.now, direct, pair_tiles, scale_lanes, dots);
  }
  return dots;
}

// Their terms: times the routing weights.
template <typename F, int kPairTiles>
inline void matrix_terms(F fragments, uint first, device const typename F::Element* x,
                         device const uint4* entries, uint count, threadgroup float* terms,
                         threadgroup const ushort* lanes, MatrixPlace place, device const uchar* routing,
                         device const uchar* bias, constant ExpertDownParams& params) {
  const TileDots<kPairTiles> dots =
      direct_tiles<F, kPairTiles>(fragments, first, x, entries, count, lanes, place, params.matmul);
  for (uint n = 2 * place.quarter; n < count; n = next_pair(n)) {
    const uint pair = entries[n].x;
    UNROLL for (int t = 0; t < kRowTiles; ++t) {
      const uint row = min(tile_output(first, t, place, params.matmul), params.matmul.outputs - 1);
      terms[pair * kMatrixRows + 8 * t + place.row] =
          weighted(dots.of(t, n), pair, entries[0].y, row, routing, bias, params);
    }
  }
}

template <typename F>
inline void matrix_terms_of_pairs(F fragments, uint first, device const typename F::Element* x,
                                  device const uint4* entries, uint count, threadgroup float* terms,
                                  threadgroup const ushort* lanes, MatrixPlace place,
                                  device const uchar* routing, device const uchar* bias,
                                  constant ExpertDownParams& params) {
  if (count <= kTilePairs) {
    matrix_terms<F, 1>(fragments, first, x, entries, count, terms, lanes, place, routing, bias, params);
  } else {
    matrix_terms<F, kMaxPairTiles>(fragments, first, x, entries, count, terms, lanes, place, routing, bias,
                                   params);
  }
}

// A threadgroup takes kMatrixRows rows, its simdgroups in turn the distinct experts of `order`, each with all
// its pairs. Grid: blocks of rows. Threadgroup memory: kMatrixRows floats a pair.
template <typename F>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_down_matrix(
    EXPERT_DOWN_BUFFERS(typename F::Element), device const uint4* order [[buffer(12)]],
    threadgroup float* terms [[threadgroup(0)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename F::Element T;
  constexpr uint kThreads = kMatrixDownSimdgroups * kSimdWidth;
  constant ExpertParams& matmul = params.matmul;
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  const uint first = group * kMatrixRows;
  clear_sentinels<kMatrixRows>(ids, terms, thread_index, kThreads, matmul);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  uint turn = 0;
  for (uint base = 0; base < matmul.pairs; base += kSimdWidth) {
    const uint entry = base + lane;
    bool starts = false;
    if (entry < matmul.pairs) {
      const uint4 own = order[entry];
      starts = own.y < matmul.experts && own.z % (kMaxPairTiles * kTilePairs) == 0;
    }
    for (uint left = ballot(starts); left != 0; left &= left - 1, ++turn) {
      if (turn % kMatrixDownSimdgroups != simdgroup) continue;
      device const uint4* entries = order + base + ctz(left);
      const uint expert = entries[0].y;
      const uint count = min(entries[0].w - entries[0].z, kMaxPairTiles * kTilePairs);
      const F fragments(packed, scales, biases, expert, matmul);
      matrix_terms_of_pairs(fragments, first, x, entries, count, terms, lanes, place, routing, bias, params);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T, kMatrixRows>(terms, first, shared_gate, shared_out, residual, out, thread_index, kThreads,
                                 params);
}
