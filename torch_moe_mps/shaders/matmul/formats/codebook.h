// GGUF's codebook formats.
#pragma once
#include "matmul/formats/grid.h"
#include "matmul/formats/small_scales.h"

// Codes are numbers of points; _weight_formats.py says where their bits are. (sign * point) * scale, or, with
// one bit a value, (point +- 1/8) * scale. Scales are (2 s + 1) times a half for 256.
template <typename T, int kBits, int kGroup, int kScaleBits, int kNumberBits, int kStreamBits>
struct GridCodes {
  typedef T Element;
  typedef PackedRows<kBits, 32> Rows;
  typedef typename Rows::Row Row;
  typedef SmallScales<32, kStreamBits, false, 0, 1> Scales;
  static constant constexpr int kValues = 32, kTileValues = 32, kPackSize = 8, kGroups = 32 / kGroup;
  // With two scales of a unit, or eight points, a thread keeps more of what it found of them.
  static constant constexpr int kPlaceBytes = Scales::kPlaceBytes + (kGroups == 2 || kBits == 3 ? 48 : 0);
  static constant constexpr bool kAnyLength = false;
  static constant constexpr bool kSigned = kBits > 1, kEven = kSigned && kStreamBits < 12;
  static constant constexpr int kPointWords = kBits == 2 ? 2 : 1;
  static constant constexpr int kPointPairs = kBits == 3 ? 2 : 4, kPoints = 16 / kPointPairs;
  static constant constexpr int kFirstNumber = kScaleBits * kGroups;
  static constant constexpr int kFirstShift = kFirstNumber + kPoints * kNumberBits;

  template <int N>
  struct Chunk {
    Words<kBits> words;
    typename Scales::Loaded scales;
  };
  typedef Chunk<32> Unit;

  Rows rows;
  Scales scales;

  GridCodes(device const uchar* packed, device const uchar* scales_, device const uchar* biases, uint expert,
            constant MatmulParams& params)
      : rows(packed, expert, params), scales(scales_, biases, rows.first_unit) {}

  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Unit load(Row row, uint column, uint) const {
    return {rows.template load<32>(row, column), scales.template load<32>(row.unit, column)};
  }

  // Contents of a unit beside its numbers' lower bits and signs.
  static uint more(Unit unit) {
    const uint own = unit.scales.integers.x;
    if constexpr (kStreamBits == 22) return own << 6 | (unit.scales.integers.y & 63);
    return kEven ? own | unit.words.v[kBits - 1] >> 28 << kStreamBits : own;
  }
  static uint number(Unit unit, int point) {
    const uint low = unit.words.v[point / 4] >> (point % 4 * 8) & 0xff;
    const int first = kFirstNumber + point * kNumberBits;
    return low | (more(unit) >> first & ((1 << kNumberBits) - 1)) << 8;
  }
  // Bit 4 i + j: of the first of the pair of values i of the j-th eight; 16 bits above it the second's.
  static uint signs(Unit unit) {
    const uint word = unit.words.v[kBits - 1];
    if (!kEven) return word;
    const uint given = word & 0x0fffffff;
    uint odd = given ^ given >> 16;
    odd ^= odd >> 8;
    odd ^= odd >> 4;
    return given | odd << 28;
  }
  // Type of the grid: that of the values of a pair.
  static uint word_of(Unit unit, int pair) {
    return kGrid.words[kPointWords * number(unit, pair / kPointPairs) + pair / 2 % kPointWords];
  }
  // Values 2 * number and 2 * number + 1 but for the scale.
  static half2 pair(Unit unit, int number) {
    const uint word = word_of(unit, number);
    if constexpr (kSigned) {
      const uint magnitudes = (number % 2 == 0 ? word << 5 : word >> 3) & 0x1fe01fe0;
      return as_type<half2>(magnitudes ^ (signs(unit) << (15 - number % 4 * 4 - number / 4) & 0x80008000));
    } else {  // 64 + level, of which 65 +- 1/8 is subtracted
      const int place = number % 4 * 4;
      const uint levels = (place == 0 ? word << 4 : word >> (place - 4)) & 0x00300030;
      const bool negative = (more(unit) >> (kFirstShift + (kStreamBits == 22 ? number / 4 : 0)) & 1) != 0;
      return as_type<half2>(levels | 0x54005400) - half2(negative ? 65.125h : 64.875h);
    }
  }

  static Pack<kPackSize> codes(Unit unit, int pack) {
    half2 pairs[kPackSize / 2];
    UNROLL for (int i = 0; i < kPackSize / 2; ++i) pairs[i] = pair(unit, 4 * pack + i);
    return in_order<kPackSize, GridCodes>(pairs);
  }
  static void add_inputs(Pack<kPackSize>, thread InputSums&) {}
  static float excess(InputSums) { return 0.0f; }
  static float scale(Unit unit, int group) {
    const uint bits = more(unit) >> (group * kScaleBits) & ((1 << kScaleBits) - 1);
    const float factor = float(unit.scales.factor) * (kBits == 1 ? 2.0f : kBits == 2 ? 16384.0f : 32768.0f);
    return fma(float(as_type<half>(ushort(bits | 0x6400))), factor, -1023.5f * factor);
  }
  static void add_dot(Unit unit, int group, float dot, InputSums, thread float& total) {
    total = fma(scale(unit, group), dot, total);
  }

  static FragmentElement place_of(int value) { return {value / 2, value % 2}; }
  static float2 values(Unit unit, int number) {
    const half2 two = pair(unit, number);
    const float own = scale(unit, 2 * number / kGroup);
    return float2(float(two.x) * own, float(two.y) * own);
  }
};
