// Affine codes as the left operand of simdgroup_matrix: 8 rows of weights, for the inputs of 8 pairs.
// A lane holds two neighbouring elements of one row of such a matrix, so the four lanes of a row, its
// quarters 0 .. 3, take a step of kStep columns together. Which columns meet in one matrix is free as long as
// they share a scale, since the dot product is a sum over all of them: it is those whose codes one mask takes
// out of a word as a pair.
//
//   strip = fragments.load(strip, row, column);            a lane's words of one step, and maybe scales
//   vec<T, 2> pair = fragments.pair(strip, unit, i);       its two elements of one matrix
//
// Unit u of a quarter starts at column unit_column(u, quarter) of the step; its pair i holds the columns i
// and i + kCodePairs from there. The elements are code + offset(i), and `add_scaled` makes dot products of
// theirs. The scale is the same for kRunUnits units in turn.
//
// An example, 4 units of codes of 4 bits, in groups of 64: kStep = 128 columns, two groups, each a run of two
// units. The lane of a row's quarter 1 loads the words of columns 16 .. 23 and 24 .. 31, units 0 and 1, and
// of 80 .. 87 and 88 .. 95, units 2 and 3. Pair 2 of unit 0 are columns 18 and 22, since their codes lie 16
// bits apart; they are elements 2 and 3 of the row in that matrix, between columns 2 and 6 of quarter 0 and
// 34 and 38 of quarter 2. On the right, the lanes that hold row 2 of the inputs' matrix have column 18, those
// of row 3 column 22.
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

// kUnitCount words of a row in a quarter of a step, codes of 4 or 8 bits in groups of 32 (kSmallGroups) or
// more.
template <typename T, int kBits, bool kSmallGroups, int kUnitCount>
struct AffineFragments {
  typedef T Element;
  static constant constexpr int kCodes = 32 / kBits;  // of a word
  static constant constexpr int kCodePairs = kCodes / 2;
  static constant constexpr int kUnits = kUnitCount;
  static constant constexpr uint kStep = 4 * kUnits * kCodes;
  static constant constexpr uint kRunColumns = kSmallGroups ? 32 : 64;
  static constant constexpr int kRuns = kStep / kRunColumns;
  static constant constexpr int kRunUnits = kUnits / kRuns;
  static constant constexpr int kMantissaPlaces = is_same_v<T, half> ? HalfCodes<kBits>::kMantissaPlaces : 1;

  // The scales of a step and then its biases, kRuns of either where groups are as long as runs, are loaded
  // four at a time by a row's quarters, and exchanged when they are needed.
  static constant constexpr int kScaleLoads = (2 * kRuns + 3) / 4;

  struct Strip {
    uint words[kUnits];
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
  HalfCodes<kBits> half_codes;

  AffineFragments(uint quarter_, constant ExpertParams& params)
      : quarter(quarter_),
        inputs(params.inputs),
        rows(params.rows),
        group_shift(params.group_shift),
        half_codes(params.bits) {
    UNROLL for (int i = 0; i < kScaleLoads; ++i) {
      scale_columns[i] = slot(i) % kRuns << group_shift;
      if (scale_columns[i] >= kStep || slot(i) >= 2 * kRuns) scale_columns[i] = inputs;
    }
  }

  // Scales are slots 0 .. kRuns - 1, biases those after them.
  uint slot(int load) const { return 4 * load + quarter; }

  // Its first row.
  Row expert(device const uchar* packed, device const uchar* scales, device const uchar* biases,
             uint number) const {
    const ulong row = ulong(number) * rows;
    Row first;
    first.words =
        reinterpret_cast<device const uint*>(packed) + (row * inputs + unit_column(0, quarter)) / kCodes;
    UNROLL for (int i = 0; i < kScaleLoads; ++i) {
      first.scales[i] = reinterpret_cast<device const T*>(slot(i) < kRuns ? scales : biases) +
                        (row * (inputs >> group_shift) + slot(i) % kRuns);
    }
    return first;
  }

  Row at(Row first, uint row) const {
    Row found = first;
    found.words += row * (inputs / kCodes);
    UNROLL for (int i = 0; i < kScaleLoads; ++i) found.scales[i] += row * (inputs >> group_shift);
    return found;
  }

  // The units of a run lie beside each other, in one load.
  static uint unit_column(uint unit, uint quarter) {
    constexpr uint kRun = kRunUnits * kCodes;
    return unit / kRunUnits * 4 * kRun + quarter * kRun + unit % kRunUnits * kCodes;
  }

  // In place of `strip`. Rows end with a whole run: beyond their end a strip's words stay what they were, to
  // be multiplied by zeros.
  Strip load(Strip strip, Row row, uint column) const {
    device const uint* source = row.words + column / kCodes;
    UNROLL for (int unit = 0; unit < kUnits; unit += kRunUnits) {
      if (column + unit_column(unit, 0) < inputs) {
        const Words<kRunUnits> words = load_words<kRunUnits>(source + unit_column(unit, 0) / kCodes);
        UNROLL for (int i = 0; i < kRunUnits; ++i) strip.words[unit + i] = words.v[i];
      }
    }
    UNROLL for (int i = 0; i < kScaleLoads; ++i) {
      strip.scales[i] = T(0.0f);
      if (column + scale_columns[i] < inputs) strip.scales[i] = row.scales[i][column >> group_shift];
    }
    return strip;
  }

  // The quarter whose lane has the scale (0) or the bias (1) of a run, and the load that it has it from.
  uint scale_quarter(int run, int kind) const {
    return (kind * kRuns + (run * kRunColumns >> group_shift)) % 4;
  }
  static constexpr int scale_load(int run, int kind) { return (kind * kRuns + (kRuns > 4 ? run : 0)) / 4; }

  // A bfloat's mantissa has room for 4 bits above its last 3: 128 + q. Other codes are converted.
  static constant constexpr bool kHasOffsets = is_same_v<T, half> || (is_same_v<T, bfloat> && kBits == 4);
  static constexpr float offset(int i) { return is_same_v<T, half> ? HalfCodes<kBits>::offset(i) : 128.0f; }

  vec<T, 2> pair(Strip strip, int unit, int i) const {
    if constexpr (is_same_v<T, half>) {
      return half_codes.pair(strip.words[unit], i);
    } else {
      const uint codes = strip.words[unit] >> (kBits * i) & half_codes.masks[0];
      if constexpr (is_same_v<T, bfloat> && kBits == 4) return as_type<vec<T, 2>>(codes | 0x43004300u);
      return vec<T, 2>(T(float(codes & 0xffffu)), T(float(codes >> 16)));
    }
  }

  // `scale_lane` has the run's scale, `bias_lane` its bias.
  void add_scaled(Strip strip, int run, ushort scale_lane, ushort bias_lane, vec<float, 2> products,
                  InputTotals totals, thread vec<float, 2>& dots) const {
    const float scale = simd_shuffle(float(strip.scales[scale_load(run, 0)]), scale_lane);
    const float bias = simd_shuffle(float(strip.scales[scale_load(run, 1)]), bias_lane);
    dots = scale * products + (bias * totals.plain + dots);
  }
};
