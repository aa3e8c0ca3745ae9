// Affine codes as the left operand of simdgroup_matrix: 8 rows of weights, for the inputs of 8 pairs.
// A lane holds two neighbouring elements of one row of such a matrix, so the four lanes of a row, its
// quarters 0 .. 3, take a step of kStep columns together. Which columns meet in one matrix is free as long as
// they share a scale, since the dot product is a sum over all of them: it is those whose codes one mask takes
// out of a word as a pair.
//
//   Strip strip = fragments.load(row, column, quarter);    a lane's words of one step, and maybe a scale
//   vec<T, 2> pair = fragments.pair(strip, unit, i);       its two elements of one matrix
//
// Unit u of a quarter starts at column unit_column(u, quarter) of the step; its pair i holds the columns i
// and i + kCodePairs from there. The elements are code + offset(i), and `add_scaled` makes dot products of
// theirs. The scale is the same for kRunUnits units in turn.
//
// An example, codes of 4 bits in groups of 64: kStep = 128 columns, two groups, each a run of two units. The
// lane of a row's quarter 1 loads the words of columns 16 .. 23 and 24 .. 31, units 0 and 1, and of 80 .. 87
// and 88 .. 95, units 2 and 3. Pair 2 of unit 0 are columns 18 and 22, since their codes lie 16 bits apart;
// they are elements 2 and 3 of the row in that matrix, between columns 2 and 6 of quarter 0 and 34 and 38 of
// quarter 2. On the right, the lanes that hold row 2 of the inputs' matrix have column 18, those of row 3
// column 22.
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

// Sums of the inputs that met some units, for a lane's two pairs: as they are, and each times the offset of
// the code that it met.
struct InputTotals {
  vec<float, 2> plain;
  vec<float, 2> offset;
};

// Four words of a row in a quarter of a step, codes of 4 or 8 bits in groups of 32 (kSmallGroups) or more.
template <typename T, int kBits, bool kSmallGroups>
struct AffineFragments {
  typedef T Element;
  static constant constexpr int kCodes = 32 / kBits;  // of a word
  static constant constexpr int kCodePairs = kCodes / 2;
  static constant constexpr int kUnits = 4;
  static constant constexpr uint kStep = 4 * kUnits * kCodes;
  static constant constexpr int kRunUnits = (kSmallGroups ? 32 : 64) / (4 * kCodes);
  static constant constexpr int kMantissaPlaces = is_same_v<T, half> ? HalfCodes<kBits>::kMantissaPlaces : 1;

  struct Strip {
    uint words[kUnits];
    T scale;  // of the step's group whose number is the lane's quarter
    T bias;
  };

  struct Row {
    device const uint* words;  // from the first that is the quarter's
    device const T* scales;
    device const T* biases;
  };

  device const uint* packed;
  device const T* scales;
  device const T* biases;
  uint inputs;
  uint group_shift;
  uint groups_per_row;
  HalfCodes<kBits> half_codes;

  AffineFragments(device const uchar* packed_, device const uchar* scales_, device const uchar* biases_,
                  uint expert, constant ExpertParams& params)
      : inputs(params.inputs),
        group_shift(params.group_shift),
        groups_per_row(params.inputs >> params.group_shift),
        half_codes(params.bits) {
    const ulong row = ulong(expert) * params.rows;
    packed = reinterpret_cast<device const uint*>(packed_) + row * (params.inputs / kCodes);
    scales = reinterpret_cast<device const T*>(scales_) + row * groups_per_row;
    biases = reinterpret_cast<device const T*>(biases_) + row * groups_per_row;
  }

  Row at(uint row, uint quarter) const {
    return {packed + (row * (inputs / kCodes) + unit_column(0, quarter) / kCodes),
            scales + (row * groups_per_row + quarter), biases + (row * groups_per_row + quarter)};
  }

  // The units of a run lie beside each other, in one load.
  static uint unit_column(uint unit, uint quarter) {
    constexpr uint kRun = kRunUnits * kCodes;
    return unit / kRunUnits * 4 * kRun + quarter * kRun + unit % kRunUnits * kCodes;
  }

  Strip load(Row row, uint column, uint quarter) const {
    Strip strip = {};
    UNROLL for (int unit = 0; unit < kUnits; unit += kRunUnits) {
      if (column + unit_column(unit, quarter) < inputs) {
        const Words<kRunUnits> words =
            load_words<kRunUnits>(row.words + (column + unit_column(unit, 0)) / kCodes);
        UNROLL for (int i = 0; i < kRunUnits; ++i) strip.words[unit + i] = words.v[i];
      }
    }
    const uint group = column >> group_shift;
    if (quarter < max(kStep >> group_shift, 1u) && group + quarter < groups_per_row) {
      strip.scale = row.scales[group];
      strip.bias = row.biases[group];
    }
    return strip;
  }

  // The quarter whose lane has the scale of a run.
  uint run_quarter(int run) const { return (run * kRunUnits * 4 * kCodes) >> group_shift; }

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

  // `lane` has the run's scale.
  void add_scaled(Strip strip, ushort lane, vec<float, 2> products, InputTotals totals,
                  thread vec<float, 2>& dots) const {
    const float scale = simd_shuffle(float(strip.scale), lane);
    const float bias = simd_shuffle(float(strip.bias), lane);
    dots = scale * products + (bias * totals.plain + dots);
  }
};
