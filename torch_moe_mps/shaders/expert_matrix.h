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
  device const T* x;
  uint first;
  uint second;
  uint first_end;
  uint second_end;

  LaneInputs() {}
  LaneInputs(device const T* x_, uint first_, uint second_, bool has_first, bool has_second,
             MatrixPlace place, uint inputs) {
    const uint column = F::unit_column(0, place.row / 2);
    const uint offset = column + place.row % 2 * F::kCodePairs;
    const uint end = inputs - min(column, inputs);  // of runs that have this column
    x = x_;
    first = first_ + offset;
    second = second_ + offset;
    first_end = has_first ? end : 0;
    second_end = has_second ? end : 0;
  }

  // Of the run at `column`: zero for a pair that is not there, and beyond the inputs.
  PairInputs<F> load(uint column) const {
    typedef typename PairInputs<F>::Source Source;
    PairInputs<F> pairs;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) pairs.first[u] = pairs.second[u] = Source(T(0.0f));
    if (column < first_end) {
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        pairs.first[u] = *reinterpret_cast<device const Source*>(x + (first + column) + F::unit_column(u, 0));
      }
    }
    if (column < second_end) {
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        pairs.second[u] =
            *reinterpret_cast<device const Source*>(x + (second + column) + F::unit_column(u, 0));
      }
    }
    return pairs;
  }
};

// The totals of inputs as products of their matrices and one whose rows have the same number everywhere, 1 or
// 0: they are where the products of the codes are.
template <typename F>
struct TotalSums {
  simdgroup_matrix<float, 8, 8> v[F::kMantissaPlaces];

  TotalSums() {
    UNROLL for (int place = 0; place < F::kMantissaPlaces; ++place) {
      v[place] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
};

// Adds the inputs that meet pair i of a unit.
template <typename F>
inline void add_inputs(thread TotalSums<F>& sums, int i, typename F::Element row,
                       vec<typename F::Element, 2> inputs) {
  typedef typename F::Element T;
  multiply_pairs<T>(sums.v[i % F::kMantissaPlaces], vec<T, 2>(row), inputs);
}

template <typename F>
inline InputTotals totals_of(thread TotalSums<F>& sums) {
  InputTotals totals = {vec<float, 2>(0.0f), vec<float, 2>(0.0f)};
  UNROLL for (int place = 0; place < F::kMantissaPlaces; ++place) {
    const vec<float, 2> plain = own_elements(sums.v[place]);
    totals.plain += plain;
    if constexpr (F::kHasOffsets) totals.less_offset -= F::offset(place) * plain;
  }
  return totals;
}

// The lanes that have the scales (0) and the biases (1) of a lane's row, for each run of a step.
template <typename F>
struct ScaleLanes {
  ushort v[2][F::kRuns];

  ScaleLanes(F fragments, RowLanes lanes) {
    UNROLL for (int kind = 0; kind < 2; ++kind) {
      UNROLL for (int r = 0; r < F::kRuns; ++r) v[kind][r] = lanes.at(fragments.scale_quarter(r, kind));
    }
  }
};

// The output of a lane's row in tile t of a block from output `first` on. Tiles 2 i and 2 i + 1 are the gates
// and the ups of the same outputs; where there are no gates, all are outputs.
inline uint tile_output(uint first, int t, MatrixPlace place, constant ExpertParams& params) {
  return first + place.row + 8 * (params.row_layout == ROWS_PLAIN ? t : t / 2);
}

// A lane's rows of kTiles tiles.
template <typename S, int kTiles>
struct StripRows {
  uint numbers[kTiles];
  typename S::Row rows[kTiles];

  // Past the last output the rows are those of the last: read, not stored.
  StripRows(uint first, MatrixPlace place, constant ExpertParams& params) {
    UNROLL for (int t = 0; t < kTiles; ++t) {
      const uint output = min(tile_output(first, t, place, params), params.outputs - 1);
      numbers[t] = weight_row(output, t % 2, params);
    }
  }

  void start(S format, typename S::Row expert) {
    UNROLL for (int t = 0; t < kTiles; ++t) rows[t] = format.at(expert, numbers[t]);
  }
};

// Its words of a step.
template <typename S, int kTiles>
struct Strips {
  typename S::Strip v[kTiles];

  Strips() {
    const typename S::Strip none = {};
    UNROLL for (int t = 0; t < kTiles; ++t) v[t] = none;
  }

  void load(S format, StripRows<S, kTiles> rows, uint column) {
    UNROLL for (int t = 0; t < kTiles; ++t) v[t] = format.load(v[t], rows.rows[t], column);
  }

  template <typename F>
  Strips arranged(F fragments, RowLanes lanes) const {
    Strips found = *this;
    UNROLL for (int t = 0; t < kTiles; ++t) found.v[t] = fragments.arranged(v[t], lanes);
    return found;
  }
};

// One step. `inputs.run(r, j)` is run r for tile j of `pair_tiles`, `inputs.totals(r, j)` its totals, if they
// are known.
template <typename F, int kTiles, int kPairTiles, typename I>
inline void add_step(F fragments, Strips<typename F::Strips, kTiles> strips, thread I& inputs,
                     uint pair_tiles, ScaleLanes<F> scale_lanes, thread TileDots<kTiles, kPairTiles>& dots) {
  typedef typename F::Element T;
  UNROLL for (int r = 0; r < F::kRuns; ++r) {
    UNROLL for (int j = 0; j < kPairTiles; ++j) {
      if (j != 0 && uint(j) >= pair_tiles) continue;
      const RunInputs<F> run = inputs.run(r, j);
      TotalSums<F> total_sums;
      simdgroup_matrix<float, 8, 8> sums[kTiles];
      UNROLL for (int t = 0; t < kTiles; ++t) sums[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        UNROLL for (int i = 0; i < F::kCodePairs; ++i) {
          UNROLL for (int t = 0; t < kTiles; ++t) {
            multiply_pairs<T>(sums[t], fragments.pair(strips.v[t], r * F::kRunUnits + u, i),
                              run.units[u].v[i]);
          }
          if constexpr (!I::kKnowsTotals) add_inputs(total_sums, i, T(1.0f), run.units[u].v[i]);
        }
      }
      InputTotals totals;
      if constexpr (I::kKnowsTotals) {
        totals = inputs.totals(r, j);
      } else {
        totals = totals_of(total_sums);
      }
      UNROLL for (int t = 0; t < kTiles; ++t) {
        fragments.add_scaled(strips.v[t], r, scale_lanes.v[0][r], scale_lanes.v[1][r], own_elements(sums[t]),
                             totals, dots.v[t][j]);
      }
    }
  }
}

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
  static constant constexpr uint kStagedTotals = kStagedRuns * F::kMaxParts + kMaxCouples;

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
        has_units(fragments.part(place.row / 2) == fragments.part(place.quarter)),
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

  void clear_zeros(uint thread_index) const {
    Unit zeros;
    UNROLL for (int i = 0; i < F::kCodePairs; ++i) zeros.v[i] = vec<T, 2>(T(0.0f));
    if (thread_index < kRunUnits) units[kZeros + thread_index] = zeros;
  }

  // Those from column `depth` on, whole steps, a run of a couple by the eight lanes of a quarter; what a
  // simdgroup takes is loaded before the first is used. `sources`: where the pairs' inputs start.
  void stage(device const T* x, threadgroup const uint* sources, uint count, uint depth, uint simdgroup,
             uint inputs) const {
    constexpr uint kAtOnce = 4 * kMatrixSimdgroups;
    constexpr int kItems = kStagedRuns / kAtOnce;
    const uint first = 4 * simdgroup + place.quarter;
    PairInputs<F> loaded[kItems];
    UNROLL for (int i = 0; i < kItems; ++i) {
      const uint item = first + i * kAtOnce;
      const uint n = 2 * (item & ((1u << couples_shift) - 1));
      const LaneInputs<F> source(x, sources[min(n, count - 1)], sources[min(n + 1, count - 1)], n < count,
                                 n + 1 < count, place, inputs);
      loaded[i] = source.load(depth + (item >> couples_shift) * F::kRunColumns);
    }
    UNROLL for (int i = 0; i < kItems; ++i) {
      const uint item = first + i * kAtOnce, number = item >> couples_shift;
      const uint step = ((item - place.quarter) >> couples_shift) / F::kRuns;
      if (depth + step * F::kStep >= inputs) break;
      const uint couple = item & ((1u << couples_shift) - 1);
      const RunInputs<F> run = loaded[i].run();
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

// Sums over the parts of a run, which its quarters have; those of part 0 are taken.
template <typename F, int kTiles, int kPairTiles>
inline void add_parts(F fragments, RowLanes lanes, thread TileDots<kTiles, kPairTiles>& dots) {
  UNROLL for (uint bit = 4 / F::kMaxParts; bit < 4; bit *= 2) {
    const ushort other = lanes.at(fragments.strips.quarter ^ bit);
    UNROLL for (int t = 0; t < kTiles; ++t) {
      UNROLL for (int j = 0; j < kPairTiles; ++j) {
        const vec<float, 2> others =
            vec<float, 2>(simd_shuffle(dots.v[t][j].x, other), simd_shuffle(dots.v[t][j].y, other));
        if (bit >> fragments.part_shift != 0) dots.v[t][j] += others;
      }
    }
  }
}

// Where a lane's sums belong: a quarter without pairs for one that repeats another one's.
template <typename F>
inline MatrixPlace place_of_sums(F fragments, MatrixPlace place) {
  return {place.row, fragments.part(place.quarter) == 0 ? place.quarter : 4};
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
  strips.load(fragments.strips, rows, 0);
  staged.clear_zeros(thread_index);
  for (uint depth = 0; depth < inputs; depth += block) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    staged.stage(x, sources, count, depth, simdgroup, inputs);
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
template <typename U>
struct RowsMemory {
  threadgroup const ushort* pairs;
  threadgroup const uint* sources;
  threadgroup const ushort* lanes;
  threadgroup U* units;
  threadgroup InputTotals* totals;
};

// `count` <= 8 kPairTiles pairs of an expert, from number `start` on.
template <typename F, int kPairTiles>
inline void matrix_rows(F fragments, typename F::Strips::Row expert, uint number, uint first,
                        device const typename F::Element* x, uint start, uint count,
                        RowsMemory<typename StagedInputs<F>::Unit> memory, MatrixPlace place,
                        device const uchar* bias, device typename F::Element* out, uint thread_index,
                        uint simdgroup, constant ExpertParams& params) {
  const StagedInputs<F> staged(memory.units, memory.totals, fragments, place, couples_shift_of(count));
  const TileDots<kRowTiles, kPairTiles> dots =
      staged_tiles<F, kPairTiles>(fragments, expert, first, x, memory.sources + start, count, staged,
                                  memory.lanes, place, thread_index, simdgroup, params);
  store_tiles(dots, bias, number, first, memory.pairs + start, count, place_of_sums(fragments, place), out,
              params);
}

// The sums of two values over a simdgroup: that of the first in its lower half, of the second in its upper.
inline float two_sums(float first, float second, uint lane) {
  constexpr uint kHalf = kSimdWidth / 2;
  const bool upper = lane >= kHalf;
  float sum = (upper ? second : first) + simd_shuffle_xor(upper ? first : second, ushort(kHalf));
  UNROLL for (uint other = kHalf / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, ushort(other));
  return sum;
}

// Rows of an expert two by two, from output `first` on: a gate and its up, or neighbours.
struct RowCouples {
  uint rows[2];
  uint stride;     // to those of the next two
  uint counts[2];  // of either

  RowCouples(uint first, uint outputs, constant ExpertParams& params) {
    const bool plain = params.row_layout == ROWS_PLAIN;
    rows[0] = weight_row(first, 0, params);
    rows[1] = plain ? first + 1 : weight_row(first, 1, params);
    stride = params.row_layout == ROWS_HALVES ? 1 : 2;
    counts[0] = plain ? (outputs + 1) / 2 : outputs;
    counts[1] = plain ? outputs / 2 : outputs;
  }
};

// A block of the inputs of an expert's only pair as floats in threadgroup memory, for a lane eight times
// kOctets columns.
template <typename W>
struct LoneInputs {
  typedef typename W::Element T;
  static constant constexpr uint kLaneColumns = 8 * W::kOctets;
  static constant constexpr uint kColumns = kSimdWidth * kLaneColumns;

  threadgroup vec<float, 4>* fours;  // [fours of a lane][lanes]

  // Those from `base` on; zeros beyond the end.
  void stage(device const T* x, uint base, uint inputs, uint thread_index) const {
    for (uint i = thread_index; i < W::kOctets * kSimdWidth; i += kMatrixSimdgroups * kSimdWidth) {
      const uint lane = i % kSimdWidth, octet = i / kSimdWidth;
      const uint column = base + lane * kLaneColumns + 8 * octet;
      Pack<8> values = {};
      if (column < inputs) values = load_octet(x + column, 8, true).values();
      UNROLL for (int half_octet = 0; half_octet < 2; ++half_octet) {
        threadgroup vec<float, 4>& four = fours[(2 * octet + half_octet) * kSimdWidth + lane];
        UNROLL for (int k = 0; k < 4; ++k) four[k] = values.v[4 * half_octet + k];
      }
    }
  }

  Pack<8> octet(int number, uint lane) const {
    Pack<8> values;
    UNROLL for (int half_octet = 0; half_octet < 2; ++half_octet) {
      const vec<float, 4> four = fours[(2 * number + half_octet) * kSimdWidth + lane];
      UNROLL for (int k = 0; k < 4; ++k) values.v[4 * half_octet + k] = four[k];
    }
    return values;
  }

  InputSums sums(uint lane) const {
    InputSums sums = {{0.0f, 0.0f}};
    UNROLL for (int o = 0; o < W::kOctets; ++o) W::coded(octet(o, lane), sums);
    return sums;
  }
};

// A lane's columns of the next two rows, loaded ahead; zeros where the lane is not active.
template <typename W>
struct RowsAhead {
  typename W::Cursor cursors[2];
  typename W::Part parts[2];

  RowsAhead(W weights, RowCouples couples, uint column, uint lane, bool active) {
    const typename W::Part none = {};
    UNROLL for (int r = 0; r < 2; ++r) {
      cursors[r] = weights.cursor(couples.rows[r], column);
      parts[r] = weights.load(none, cursors[r], lane, active && couples.counts[r] != 0);
    }
  }

  // The i-th two.
  void load(W weights, RowCouples couples, uint i, uint lane, bool active) {
    UNROLL for (int r = 0; r < 2; ++r) {
      cursors[r] = weights.advanced(cursors[r], couples.stride);
      parts[r] = weights.load(parts[r], cursors[r], lane, active && i < couples.counts[r]);
    }
  }
};

// The dot products of rows with a block of inputs. Those of the i-th two are of lane i and of lane 16 + i.
template <typename W>
inline float dots_of_pair(W weights, LoneInputs<W> inputs, RowCouples couples, RowsAhead<W> ahead,
                          bool active, uint lane) {
  const InputSums sums = inputs.sums(lane);
  float found = 0.0f;
  for (uint i = 0; i < couples.counts[0]; ++i) {
    typename W::Chunk rows[2];
    UNROLL for (int r = 0; r < 2; ++r) rows[r] = weights.shared(ahead.parts[r], lane);
    ahead.load(weights, couples, i + 1, lane, active);
    // Keeps the loads here and the inputs where they are: without it the compiler (NVRTC) loads rows just
    // before they are used, and takes the inputs into registers, too many.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float dots[2] = {0.0f, 0.0f};
    UNROLL for (int o = 0; o < W::kOctets; ++o) {
      const Pack<8> values = inputs.octet(o, lane);
      UNROLL for (int r = 0; r < 2; ++r) {
        const Pack<8> codes = weights.codes(rows[r], o);
        UNROLL for (int k = 0; k < 8; ++k) dots[r] = fma(codes.v[k], values.v[k], dots[r]);
      }
    }
    const float sum =
        two_sums(weights.scaled(rows[0], dots[0], sums), weights.scaled(rows[1], dots[1], sums), lane);
    if (lane % (kSimdWidth / 2) == i) found += sum;
  }
  return found;
}

// Its outputs, those of a simdgroup from `first` on.
template <typename W>
inline void rows_of_pair(W weights, device const typename W::Element* x, LoneInputs<W> inputs, PairList list,
                         uint first, uint thread_index, uint lane, device const uchar* bias,
                         device typename W::Element* out, constant ExpertParams& params) {
  constexpr uint kHalf = kSimdWidth / 2;
  const bool plain = params.row_layout == ROWS_PLAIN;
  const uint outputs =
      first < params.outputs ? min(outputs_of_rows(kMatrixRows, params), params.outputs - first) : 0;
  const RowCouples couples(first, outputs, params);
  float own = 0.0f;
  for (uint base = 0; base < params.inputs; base += LoneInputs<W>::kColumns) {
    const uint column = base + lane * LoneInputs<W>::kLaneColumns;
    const bool active = column < params.inputs;
    const RowsAhead<W> ahead(weights, couples, column, lane, active);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    inputs.stage(x + input_row(list.first, params) * params.inputs, base, params.inputs, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    own += dots_of_pair(weights, inputs, couples, ahead, active, lane);
  }
  const float up = simd_shuffle(own, ushort(lane | kHalf));
  const uint output = plain ? 2 * (lane % kHalf) + lane / kHalf : lane;
  if (output >= outputs) return;
  out[ulong(list.first) * params.outputs + first + output] =
      typename W::Element(finished_output(own, up, bias, list.expert, first + output, params));
}

// Grid: see pairs_of_expert. W and S are the same format.
template <typename W, typename S>
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
  typedef UnitInputs<T, S::kCodePairs> Unit;
  threadgroup Unit units[StagedInputs<FewFragments<S>>::kStagedUnits];
  threadgroup InputTotals totals[StagedInputs<FewFragments<S>>::kStagedTotals];

  const uint block = outputs_of_rows(kMatrixSimdgroups * kMatrixRows, params);
  const PairList list = pairs_of_expert(ids, pairs, order, out, block, group, groups, thread_index, kThreads,
                                        lane, simdgroup, params);
  if (list.count == 0) return;
  const uint first = group.x * block + simdgroup * outputs_of_rows(kMatrixRows, params);
  if (list.count == 1) {
    const W weights(packed, scales, biases, list.expert, params);
    const LoneInputs<W> inputs = {reinterpret_cast<threadgroup vec<float, 4>*>(units)};
    rows_of_pair(weights, x, inputs, list, first, thread_index, lane, bias, out, params);
    return;
  }
  for (uint i = thread_index; i < list.count; i += kThreads) {
    sources[i] = input_row(pairs[i], params) * params.inputs;
  }
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const RowsMemory<Unit> memory = {pairs, sources, lanes, units, totals};
  const S strips(place.quarter, params);
  const FewFragments<S> few(strips);
  if (list.count <= few.tile_pairs()) {
    matrix_rows<FewFragments<S>, 1>(few, strips.expert(packed, scales, biases, list.expert), list.expert,
                                    first, x, 0, list.count, memory, place, bias, out, thread_index,
                                    simdgroup, params);
    return;
  }
  typedef typename S::OneLoad ManyStrips;
  const ManyStrips many_strips(place.quarter, params);
  const ManyFragments<ManyStrips> many(many_strips);
  for (uint start = 0; start < list.count; start += kMatrixPairsAtOnce) {
    const uint count = min(list.count - start, kMatrixPairsAtOnce);
    matrix_rows<ManyFragments<ManyStrips>, kMaxPairTiles>(
        many, many_strips.expert(packed, scales, biases, list.expert), list.expert, first, x, start, count,
        memory, place, bias, out, thread_index, simdgroup, params);
  }
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
  const bool has_inputs = fragments.part(place.row / 2) == fragments.part(place.quarter);
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
                     PairTerms<kMatrixDownRows> terms, MatrixPlace place) {
  for (uint n = 2 * place.quarter; n < entries.count; n = next_pair(n)) {
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

// For the whole threadgroup. `heads`: kMaxMatrixPairs; `few_pairs`: the most that are few.
inline Heads find_heads(device const uint4* order, threadgroup uint2* heads, uint few_pairs, uint lane,
                        uint simdgroup, constant ExpertParams& params) {
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
  threadgroup_barrier(mem_flags::mem_threadgroup);
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

// The dot products of the experts `first` .. `end` - 1 of `heads`, of which a simdgroup takes every
// kMatrixDownSimdgroups-th.
template <typename F, int kPairTiles>
inline void down_of_experts(F fragments, DownBlock<typename F::Strips> block, device const uint4* order,
                            Heads heads, uint first, uint end, RowLanes lanes, MatrixPlace place,
                            constant ExpertParams& params) {
  typedef typename F::Strips S;
  constexpr Part kWhole = {0, S::kStep};
  if (first >= end) return;
  Entries entries = heads.entries(order, first);
  StripRows<S, kDownTiles> rows(block.first, place, params);
  Strips<S, kDownTiles> strips;
  rows.start(block.format, block.expert(entries.expert));
  strips.load(block.format, rows, 0);
  for (uint number = first; number < end; number += kMatrixDownSimdgroups) {
    const bool has_more = number + kMatrixDownSimdgroups < end;
    const Entries more = heads.entries(order, has_more ? number + kMatrixDownSimdgroups : number);
    const TileDots<kDownTiles, kPairTiles> dots =
        direct_tiles<F, kPairTiles>(fragments, rows, strips, kWhole, has_more, block.expert(more.expert),
                                    block.x, entries, lanes, place, params);
    add_dots(dots, true, entries, block.terms, place_of_sums(fragments, place));
    entries = more;
  }
}

// A threadgroup takes kMatrixDownRows rows, its simdgroups in turn the distinct experts of `order`, each with
// all its pairs: first those with few, so that they do not share registers with those with many. Grid: blocks
// of rows. Threadgroup memory: kMatrixDownRows + 1 floats a pair.
template <typename S>
[[kernel, max_total_threads_per_threadgroup(kMatrixDownSimdgroups * 32)]] void expert_down_matrix(
    EXPERT_DOWN_FEW_BUFFERS(typename S::Element), uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename S::Element T;
  constexpr uint kThreads = kMatrixDownSimdgroups * kSimdWidth;
  constant ExpertParams& matmul = params.matmul;
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  threadgroup uint2 starts[kMaxMatrixPairs];
  const uint first = group * kMatrixDownRows;
  const PairTerms<kMatrixDownRows> terms(memory, matmul.pairs);
  terms.start(ids, routing, thread_index, kThreads, params);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const RowLanes row_lanes(lanes, place);
  const DownBlock<S> block = {S(place.quarter, matmul), x, packed, scales, biases, terms, first};
  const FewFragments<S> few(block.format);
  const ManyFragments<S> many(block.format);
  const Heads heads = find_heads(order, starts, few.tile_pairs(), lane, simdgroup, matmul);
  down_of_experts<FewFragments<S>, 1>(few, block, order, heads, simdgroup, heads.few, row_lanes, place,
                                      matmul);
  down_of_experts<ManyFragments<S>, kMaxPairTiles>(many, block, order, heads, heads.few + simdgroup,
                                                   heads.few + heads.many, row_lanes, place, matmul);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T, kMatrixDownRows>(terms, first, ids, bias, shared_gate, shared_out, residual, out,
                                     thread_index, kThreads, params);
}

// How many simdgroups, as a power of two, each of so few experts can have.
inline uint parts_of_expert(uint experts) {
  uint parts = 1;
  while (experts != 0 && 2 * parts * experts <= kPartsSimdgroups) parts *= 2;
  return parts;
}

// The same for so few experts that several simdgroups can share each: one takes every so many a step of its
// columns. At most kPartsSimdgroups entries may start an expert.
template <typename S>
[[kernel, max_total_threads_per_threadgroup(kPartsSimdgroups * 32)]] void expert_down_parts(
    EXPERT_DOWN_FEW_BUFFERS(typename S::Element), uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename S::Element T;
  constexpr uint kThreads = kPartsSimdgroups * kSimdWidth;
  constant ExpertParams& matmul = params.matmul;
  threadgroup float numbers[64];
  threadgroup ushort lanes[kSimdWidth];
  threadgroup uint2 starts[kMaxMatrixPairs];
  const uint first = group * kMatrixDownRows;
  const PairTerms<kMatrixDownRows> terms(memory, matmul.pairs);
  terms.start(ids, routing, thread_index, kThreads, params);
  const MatrixPlace place = find_place(numbers, lanes, thread_index, lane);
  const S format(place.quarter, matmul);
  const FewFragments<S> few(format);
  const ManyFragments<S> many(format);
  const RowLanes row_lanes(lanes, place);
  const Heads heads = find_heads(order, starts, few.tile_pairs(), lane, simdgroup, matmul);
  const uint parts = parts_of_expert(heads.few + heads.many), own_part = simdgroup % parts,
             number = simdgroup / parts;
  Entries entries = {order, 0, 0};
  if (number < heads.few + heads.many) entries = heads.entries(order, number);
  const Part part = {own_part * S::kStep, parts * S::kStep};
  const typename S::Row expert = format.expert(packed, scales, biases, entries.expert);
  TileDots<kDownTiles, kMaxPairTiles> dots;
  MatrixPlace own_place = place;
  if (entries.count != 0) {
    StripRows<S, kDownTiles> rows(first, place, matmul);
    Strips<S, kDownTiles> strips;
    rows.start(format, expert);
    strips.load(format, rows, part.column);
    if (entries.count <= few.tile_pairs()) {
      const TileDots<kDownTiles, 1> tile = direct_tiles<FewFragments<S>, 1>(
          few, rows, strips, part, false, expert, x, entries, row_lanes, place, matmul);
      UNROLL for (int t = 0; t < kDownTiles; ++t) dots.v[t][0] = tile.v[t][0];
      own_place = place_of_sums(few, place);
    } else {
      dots = direct_tiles<ManyFragments<S>, kMaxPairTiles>(many, rows, strips, part, false, expert, x,
                                                           entries, row_lanes, place, matmul);
    }
  }
  // In turn, so that the sums always have the same order.
  for (uint turn = 0; turn < parts; ++turn) {
    if (turn == own_part) {
      add_dots(dots, turn == 0, entries, terms, own_place);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_combined<T, kMatrixDownRows>(terms, first, ids, bias, shared_gate, shared_out, residual, out,
                                     thread_index, kThreads, params);
}
