// Affine weights as 8x8 matrices times the inputs of several pairs: what the kernels for 2 to 32 tokens
// share.
#pragma once
#include "expert_decode.h"
#include "expert_fragments.h"

constant constexpr uint kTilePairs = 8;  // whose inputs are the columns of one matrix
constant constexpr int kMaxPairTiles = kMatrixPairsAtOnce / kTilePairs;

template <typename T>
inline void multiply_pairs(thread simdgroup_matrix<float, 8, 8>& sums, vec<T, 2> weights, vec<T, 2> inputs) {
  simdgroup_matrix<T, 8, 8> a, b;
  own_elements(a) = weights;
  own_elements(b) = inputs;
  simdgroup_multiply_accumulate(sums, a, b, sums);
}

// Two tiles of weights with the same inputs. The products follow each other: hardware with larger matrices
// can take them as one.
template <typename T>
inline void multiply_pairs(thread simdgroup_matrix<float, 8, 8>* sums, vec<T, 2> first, vec<T, 2> second,
                           vec<T, 2> inputs) {
  simdgroup_matrix<T, 8, 8> first_weights, second_weights, right;
  own_elements(first_weights) = first;
  own_elements(second_weights) = second;
  own_elements(right) = inputs;
  simdgroup_multiply_accumulate(sums[0], first_weights, right, sums[0]);
  simdgroup_multiply_accumulate(sums[1], second_weights, right, sums[1]);
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

// The pairs whose sums a lane stores: of those of its columns, two neighbours of each tile, both or one.
struct StoredPairs {
  uint first;
  bool both;
  uint next(uint n) const {
    if (!both) return n + kTilePairs;
    return n % 2 == 0 ? n + 1 : n + kTilePairs - 1;
  }
};

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

// The inputs of two pairs as a lane meets them: where its own are in quarter 0's units, and up to which
// column.
template <typename F>
struct LaneInputs {
  typedef typename F::Element T;
  device const T* x;
  uint first;
  uint second;
  bool has_first;
  bool has_second;
  uint end;

  LaneInputs() {}
  LaneInputs(device const T* x_, uint first_, uint second_, bool has_first_, bool has_second_,
             MatrixPlace place, uint inputs)
      : x(x_), first(first_), second(second_), has_first(has_first_), has_second(has_second_) {
    const uint column = F::unit_column(0, place.row / 2);
    const uint offset = column + place.row % 2 * F::kCodePairs;
    first += offset;
    second += offset;
    end = inputs - min(column, inputs);  // of runs that have this column
  }

  // Of the run at `column`: zero for a pair that is not there, and beyond the inputs.
  PairInputs<F> load(uint column) const {
    typedef typename PairInputs<F>::Source Source;
    PairInputs<F> pairs;
    UNROLL for (int u = 0; u < F::kRunUnits; ++u) pairs.first[u] = pairs.second[u] = Source(T(0.0f));
    if (has_first && column < end) {
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        pairs.first[u] = *reinterpret_cast<device const Source*>(x + (first + column) + F::unit_column(u, 0));
      }
    }
    if (has_second && column < end) {
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
  static_assert(kTiles % 2 == 0, "they are multiplied in twos");
  UNROLL for (int r = 0; r < F::kRuns; ++r) {
    UNROLL for (int j = 0; j < kPairTiles; ++j) {
      if (j != 0 && uint(j) >= pair_tiles) continue;
      const RunInputs<F> run = inputs.run(r, j);
      TotalSums<F> total_sums;
      simdgroup_matrix<float, 8, 8> sums[kTiles];
      UNROLL for (int t = 0; t < kTiles; ++t) sums[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      UNROLL for (int u = 0; u < F::kRunUnits; ++u) {
        UNROLL for (int i = 0; i < F::kCodePairs; ++i) {
          UNROLL for (int t = 0; t < kTiles; t += 2) {
            const int unit = r * F::kRunUnits + u;
            multiply_pairs<T>(sums + t, fragments.pair(strips.v[t], unit, i),
                              fragments.pair(strips.v[t + 1], unit, i), run.units[u].v[i]);
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

// Sums over the parts of a run, which its quarters have: in the end all parts have them.
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

// Where there are several parts, the first two share the pairs out; no pair is left for a third.
template <typename F>
inline StoredPairs stored_pairs(F fragments, MatrixPlace place) {
  return {2 * fragments.couple(place.quarter) + fragments.part(place.quarter), fragments.part(3) == 0};
}

// The first part stores all pairs. In the down projection this is faster: 25.5 instead of 27.3 us (NVIDIA
// H200, int4, 8 tokens).
template <typename F>
inline StoredPairs stored_by_first(F fragments, MatrixPlace place) {
  return {fragments.part(place.quarter) == 0 ? 2 * place.quarter : kMatrixPairsAtOnce, true};
}
