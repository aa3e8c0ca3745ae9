// Affine codes as the left operand of simdgroup_matrix: 8 rows of weights, for the inputs of several pairs.
// A lane holds two neighbouring elements of one row of such a matrix, so the four lanes of a row, its
// quarters 0 .. 3, take its columns together: each 16 bytes at a time, beside each other. Which columns meet
// in one matrix is free, since the dot product is a sum over all of them: it is those whose codes one mask
// takes out of a word as a pair.
//
//   strip = strips.load(strip, row, column);          a lane's words of one step, and maybe scales
//   strip = fragments.arranged(strip, lanes);
//   vec<T, 2> pair = fragments.pair(strip, unit, i);  its two elements of one matrix
//
// Units are words, in runs of kRunUnits. Unit u of a quarter starts at column unit_column(u, quarter) of the
// step; its pair i holds the columns i and i + kCodePairs from there. The elements are code + offset(i), and
// `add_scaled` makes dot products of a run's sums.
//
// A matrix whose columns belong to several groups has a scale for each: the right operand then has as many
// parts, each with the inputs of one group and zeros for the others, so that its 8 columns serve fewer pairs
// (FewFragments). For more pairs the quarters exchange words until each matrix is of one group
// (ManyFragments).
//
// An example, codes of 4 bits in groups of 64: a load covers 128 columns, two groups; quarter 1 has columns
// 32 .. 63. Pair 2 of unit 0 are columns 34 and 38, since their codes lie 16 bits apart; they are elements 2
// and 3 of the row in that matrix, between columns 2 and 6 of quarter 0 and 66 and 70 of quarter 2. On the
// right, rows 0 .. 3 are inputs of the first group in columns 0 .. 3, for four pairs, and rows 4 .. 7 of the
// second group in columns 4 .. 7. Exchanged, quarter 1 has columns 32 .. 47 and 96 .. 111, and 8 pairs meet
// matrices of the first group in units 0 and 1, of the second in units 2 and 3.
#pragma once
#include <metal_simdgroup_matrix>

#include "expert_formats.h"

// The two elements of a matrix that a lane holds. Metal declares all 64; a lane's own come first.
template <typename T>
inline thread vec<T, 2>& own_elements(thread simdgroup_matrix<T, 8, 8>& whole) {
  return reinterpret_cast<thread vec<T, 2>&>(whole.thread_elements());
}

// Where a lane's two elements lie in an 8x8 matrix: row, and columns 2 quarter and 2 quarter + 1. Read from a
// matrix instead of written down: the layout is the hardware's own.
struct MatrixPlace {
  uint row;
  uint quarter;
};

// For the whole threadgroup, which finds in `lanes` (32 elements) the lane of each place: of a row's quarters
// in turn. `numbers`: 64 elements.
inline MatrixPlace find_place(threadgroup float* numbers, threadgroup ushort* lanes, uint thread_index,
                              uint lane) {
  if (thread_index < 64) numbers[thread_index] = float(thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> loaded;
  simdgroup_load(loaded, numbers, 8);
  const uint element = uint(own_elements(loaded).x);
  if (thread_index < kSimdWidth) lanes[element / 2] = ushort(lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return {element / 8, element % 8 / 2};
}

// The inputs of a lane's two pairs that meet one unit: the right operand's elements.
template <typename T, int kCodePairs>
struct UnitInputs {
  vec<T, 2> v[kCodePairs];
};

// Sums of the inputs that met some units, for a lane's two pairs: as they are, and minus each times the
// offset of the code that it met.
struct InputTotals {
  vec<float, 2> plain;
  vec<float, 2> less_offset;
};

// How the lanes load rows of codes of 4 or 8 bits, in groups of 32 (kSmallGroups) or more: in each step
// kLoadCount times 16 bytes of a row by each of its quarters, which lie beside each other.
template <typename T, int kBits, bool kSmallGroups, int kLoadCount>
struct AffineStrips {
  typedef T Element;
  typedef AffineStrips<T, kBits, kSmallGroups, 1> OneLoad;
  typedef HalfCodes<kBits> Codes;
  static constant constexpr int kCodes = 32 / kBits;  // of a word
  static constant constexpr int kCodePairs = kCodes / 2;
  static constant constexpr int kLoads = kLoadCount;
  static constant constexpr uint kLaneColumns = 4 * kCodes;
  static constant constexpr uint kLoadColumns = 4 * kLaneColumns;
  static constant constexpr uint kStep = kLoads * kLoadColumns;
  static constant constexpr uint kGroupColumns = kSmallGroups ? 32 : 64;  // or more
  static constant constexpr int kGroups = kStep / kGroupColumns;          // or fewer
  static constant constexpr int kMantissaPlaces = is_same_v<T, half> ? Codes::kMantissaPlaces : 1;

  // The scales of a step and then its biases, kGroups of either, are loaded four at a time by a row's
  // quarters, and exchanged when they are needed.
  static constant constexpr int kScaleLoads = (2 * kGroups + 3) / 4;

  struct Strip {
    uint words[4 * kLoads];
    T scales[kScaleLoads];
  };

  // From what is the lane's on.
  struct Row {
    device const uint* words;
    device const T* scales[kScaleLoads];
  };

  uint quarter;
  uint inputs;
  uint rows;
  uint group_shift;
  uint scale_columns[kScaleLoads];  // the first, within a step, of each group; `inputs` if there is none
  Codes codes;

  AffineStrips(uint quarter_, constant ExpertParams& params)
      : quarter(quarter_),
        inputs(params.inputs),
        rows(params.rows),
        group_shift(params.group_shift),
        codes(params.bits) {
    UNROLL for (int i = 0; i < kScaleLoads; ++i) {
      scale_columns[i] = slot(i) % kGroups << group_shift;
      if (scale_columns[i] >= kStep || slot(i) >= 2 * kGroups) scale_columns[i] = inputs;
    }
  }

  // Scales are slots 0 .. kGroups - 1, biases those after them.
  uint slot(int load) const { return 4 * load + quarter; }

  // Its first row.
  Row expert(device const uchar* packed, device const uchar* scales, device const uchar* biases,
             uint number) const {
    const ulong row = ulong(number) * rows;
    Row first;
    first.words = reinterpret_cast<device const uint*>(packed) + (row * (inputs / kCodes) + 4 * quarter);
    UNROLL for (int i = 0; i < kScaleLoads; ++i) {
      first.scales[i] = reinterpret_cast<device const T*>(slot(i) < kGroups ? scales : biases) +
                        (row * (inputs >> group_shift) + slot(i) % kGroups);
    }
    return first;
  }

  Row at(Row first, uint row) const {
    Row found = first;
    found.words += row * (inputs / kCodes);
    UNROLL for (int i = 0; i < kScaleLoads; ++i) found.scales[i] += row * (inputs >> group_shift);
    return found;
  }

  // In place of `strip`, whose words stay what they were beyond the row's end, to be multiplied by zeros.
  Strip load(Strip strip, Row row, uint column) const {
    device const uint* source = row.words + column / kCodes;
    UNROLL for (int i = 0; i < kLoads; ++i) {
      if (column + i * kLoadColumns + quarter * kLaneColumns < inputs) {
        const Words<4> words = load_words<4>(source + i * (kLoadColumns / kCodes));
        UNROLL for (int j = 0; j < 4; ++j) strip.words[4 * i + j] = words.v[j];
      }
    }
    UNROLL for (int i = 0; i < kScaleLoads; ++i) {
      strip.scales[i] = T(0.0f);
      if (column + scale_columns[i] < inputs) strip.scales[i] = row.scales[i][column >> group_shift];
    }
    return strip;
  }
};

// The lanes of a lane's row, by quarter.
struct RowLanes {
  ushort v[4];
  RowLanes(threadgroup const ushort* lanes, MatrixPlace place) {
    UNROLL for (int quarter = 0; quarter < 4; ++quarter) v[quarter] = lanes[4 * place.row + quarter];
  }
  ushort at(uint quarter) const {
    const ushort low = quarter & 1 ? v[1] : v[0], high = quarter & 1 ? v[3] : v[2];
    return quarter & 2 ? high : low;
  }
};

// Strips as operands. kApart: into how many runs, of a group each, the words that the quarters of a row load
// together are put apart; 1: they stay where they are, in one run.
template <typename S, int kApart>
struct AffineFragments {
  typedef typename S::Element T;
  typedef T Element;
  typedef S Strips;
  typedef typename S::Strip Strip;
  static constant constexpr int kCodes = S::kCodes;
  static constant constexpr int kCodePairs = S::kCodePairs;
  static constant constexpr int kMantissaPlaces = S::kMantissaPlaces;
  static constant constexpr uint kStep = S::kStep;
  static constant constexpr int kRuns = S::kLoads * kApart;
  static constant constexpr int kRunUnits = 4 / kApart;
  static constant constexpr uint kRunColumns = S::kLoadColumns / kApart;
  static constant constexpr uint kMaxParts = kRunColumns / S::kGroupColumns;  // of a run

  S strips;
  uint part_shift;  // of the quarters that share a group of a run

  AffineFragments(S strips_) : strips(strips_), part_shift(2) {
    if (kMaxParts == 4 && 4u << strips.group_shift <= kRunColumns) {
      part_shift = 0;
    } else if (kMaxParts >= 2 && 2u << strips.group_shift <= kRunColumns) {
      part_shift = 1;
    }
  }

  // A matrix on the right has as columns these pairs, once for each part of the run: zeros where row and
  // column are not of the same one.
  uint tile_pairs() const { return 2u << part_shift; }
  uint part(uint quarter) const { return quarter >> part_shift; }
  uint couple(uint quarter) const { return quarter & ((1u << part_shift) - 1); }
  bool meets_inputs(MatrixPlace place) const { return part(place.row / 2) == part(place.quarter); }

  // The units of a run lie beside each other.
  static uint unit_column(uint unit, uint quarter) {
    constexpr uint kTogether = 4 / kApart;  // quarters
    return unit / kRunUnits * kRunColumns + quarter % kTogether * S::kLaneColumns +
           (quarter / kTogether * kRunUnits + unit % kRunUnits) * kCodes;
  }

  // Words change places so that each run has a group of its own.
  Strip arranged(Strip strip, RowLanes lanes) const {
    UNROLL for (int i = 0; i < 4 * S::kLoads; i += 4) {
      if constexpr (kApart >= 2) {
        exchange(strip.words[i], strip.words[i + 2], 2, lanes);
        exchange(strip.words[i + 1], strip.words[i + 3], 2, lanes);
      }
      if constexpr (kApart == 4) {
        exchange(strip.words[i], strip.words[i + 1], 1, lanes);
        exchange(strip.words[i + 2], strip.words[i + 3], 1, lanes);
      }
    }
    return strip;
  }

  // A quarter without `bit` gives its second word for the first one of the quarter with it.
  void exchange(thread uint& first, thread uint& second, uint bit, RowLanes lanes) const {
    const bool has_bit = (strips.quarter & bit) != 0;
    const uint other = simd_shuffle(has_bit ? first : second, lanes.at(strips.quarter ^ bit));
    first = has_bit ? other : first;
    second = has_bit ? second : other;
  }

  // The quarter whose lane has the scale (0) or the bias (1) of a lane's part of a run, and the load that it
  // has it from.
  uint scale_quarter(int run, int kind) const {
    const uint column = run * kRunColumns + (kApart == 1 ? strips.quarter * S::kLaneColumns : 0);
    return (kind * S::kGroups + (column >> strips.group_shift)) % 4;
  }
  static constexpr int scale_load(int run, int kind) {
    return (kind * S::kGroups + (S::kGroups > 4 ? run * (S::kGroups / kRuns) : 0)) / 4;
  }

  // A bfloat's mantissa has room for 4 bits above its last 3: 128 + q. Other codes are converted.
  static constant constexpr bool kHasOffsets = is_same_v<T, half> || (is_same_v<T, bfloat> && kCodes == 8);
  static constexpr float offset(int i) { return is_same_v<T, half> ? S::Codes::offset(i) : 128.0f; }

  vec<T, 2> pair(Strip strip, int unit, int i) const {
    if constexpr (is_same_v<T, half>) {
      return strips.codes.pair(strip.words[unit], i);
    } else {
      const uint codes = strip.words[unit] >> (32 / kCodes * i) & strips.codes.masks[0];
      if constexpr (is_same_v<T, bfloat> && kCodes == 8) return as_type<vec<T, 2>>(codes | 0x43004300u);
      return vec<T, 2>(T(float(codes & 0xffffu)), T(float(codes >> 16)));
    }
  }

  // `scale_lane` has the run's scale, `bias_lane` its bias.
  void add_scaled(Strip strip, int run, ushort scale_lane, ushort bias_lane, vec<float, 2> products,
                  InputTotals totals, thread vec<float, 2>& dots) const {
    const float scale = simd_shuffle(float(strip.scales[scale_load(run, 0)]), scale_lane);
    const float bias = simd_shuffle(float(strip.scales[scale_load(run, 1)]), bias_lane);
    dots = scale * (products + totals.less_offset) + (bias * totals.plain + dots);
  }
};

// For few pairs, and for many: up to tile_pairs() of the first, 8 a tile of the second.
template <typename S>
using FewFragments = AffineFragments<S, 1>;
template <typename S>
using ManyFragments = AffineFragments<S, S::kLoadColumns / S::kGroupColumns>;
