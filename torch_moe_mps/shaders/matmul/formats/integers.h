// Integer codes, with scales of one kind or another.
#pragma once
#include "matmul/formats/half_codes.h"
#include "matmul/formats/packed_rows.h"

// Where the scales and biases of integer codes come from. A unit is kUnit values with kUnit / kGroup groups;
//
//   load<N>(unit, column)   Loaded: those of N values from `column` on, in a row that begins with `unit`
//   of<kInDots>(loaded, group)   ScaleAndBias, exact, for add_dot() or for values()
//   kPlaceBytes             what a thread keeps to find them, beyond where the row's codes are
//   kOffset                 what is subtracted from codes before they are scaled; if not 0, biases are 0
struct ScaleAndBias {
  float scale, bias;
};

// (q - offset) * scale + bias, q of kBits bits. The products of ggml's scales, biases and codes are floats,
// so that one rounding is left, as in ggml.
template <typename T, int kBits, typename Scales>
struct Integers {
  typedef T Element;
  typedef HalfCodes<kBits> Codes;
  typedef PackedRows<kBits, Scales::kUnit> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = 32;
  static constant constexpr int kTileValues = kBits % 2 == 0 ? 16 : 32;  // fills words
  static constant constexpr int kPackSize = kBits <= 2 ? 16 : 8;         // holds whole pairs
  static constant constexpr int kPlaceBytes = Scales::kPlaceBytes;
  static constant constexpr int kGroups = kValues > Scales::kGroup ? kValues / Scales::kGroup : 1;
  static constant constexpr bool kAnyLength = false;
  // The constant added to q - offset is at most 2^10 + 2^7. Its rounding error, 2^-24 of it, is less than
  // 1e-5 of q's range and below the rounding of 16-bit activations. For float activations it is subtracted
  // first.
  static constant constexpr bool kExact = sizeof(T) == 4;

  template <int N>
  struct Chunk {
    Words<N * kBits / 32> words;
    typename Scales::Loaded scales;
  };

  Rows rows;
  Scales scales;

  Integers(device const uchar* packed, device const uchar* scales_, device const uchar* biases, uint expert,
           constant MatmulParams& params)
      : rows(packed, expert, params), scales(scales_, biases, rows.first_unit) {}

  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Chunk<N> load(Row row, uint column, uint) const {
    return {rows.template load<N>(row, column), scales.template load<N>(row.unit, column)};
  }

  // How much more codes are than q - offset; with added(), how much more the halves of code_pair() are.
  static float excess(int height) { return Codes::added(height) + float(Scales::kOffset); }
  static float added(int height) { return kExact ? 0.0f : excess(height); }
  template <int N>
  static half2 code_pair(Chunk<N> chunk, int pair) {
    half2 codes = Codes::pair(chunk.words, pair);
    if (kExact) {
      codes -= half2(half(excess(Codes::height(pair, 0))), half(excess(Codes::height(pair, 1))));
    }
    return codes;
  }

  static Pack<kPackSize> codes(Chunk<kValues> chunk, int pack) {
    half2 pairs[kPackSize / 2];
    UNROLL for (int i = 0; i < kPackSize / 2; ++i) pairs[i] = code_pair(chunk, pack * kPackSize / 2 + i);
    return in_order<kPackSize, Codes>(pairs);
  }

  static void add_inputs(Pack<kPackSize> inputs, thread InputSums& sums) {
    UNROLL for (int i = 0; i < kPackSize; ++i) {
      const FragmentElement place = place_of(i);
      sums.v[Codes::height(place.number, place.element)] += inputs.v[i];
    }
  }

  static float excess(InputSums sums) {
    if (kExact) return 0.0f;
    const float first = added(0) * sums.v[0];
    return Codes::kHeights == 1 ? first : fma(added(1), sums.v[1], first);
  }
  static void add_dot(Chunk<kValues> chunk, int group, float dot, InputSums sums, thread float& total) {
    const ScaleAndBias own = Scales::template of<true>(chunk.scales, group);
    total = fma(own.scale, dot, total);
    if (Scales::kOffset != 0) return;
    total = fma(own.bias, Codes::kHeights == 1 ? sums.v[0] : sums.v[0] + sums.v[1], total);
  }

  static FragmentElement place_of(int value) { return Codes::place_of(value); }
  template <int N>
  static float2 values(Chunk<N> chunk, int number) {
    const int value = number / Codes::kCodePairs * 2 * Codes::kCodePairs;  // the first of the pair's run
    const ScaleAndBias own = Scales::template of<false>(chunk.scales, value / Scales::kGroup);
    const half2 codes = code_pair(chunk, number);
    float2 two;
    UNROLL for (int i = 0; i < 2; ++i) {
      two[i] = fma(float(codes[i]), own.scale, fma(-added(Codes::height(number, i)), own.scale, own.bias));
    }
    return two;
  }
};
