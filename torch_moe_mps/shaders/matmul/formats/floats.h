// Codes that are small floats: mxfp4, mxfp8, nvfp4, fp8.
#pragma once
#include "matmul/formats/half_codes.h"
#include "matmul/formats/packed_rows.h"

// Code pairs of a word.
template <int kCount>
struct HalfPairs {
  half2 v[kCount];
};

// The codes of float formats. The bits of an e2m1 or e4m3 number, moved to the top of a half's
// exponent and mantissa, are the number times a power of two, subnormals included. The product with its
// inverse is taken in half, which keeps subnormals, and is exact. The sign has to move further than the rest:
// a sum carries it there. Where there is no sign, the sum sets bits in between, and a mask clears them.
struct E2M1 {
  static constant constexpr int kBits = 4;
  static constant constexpr float kDivisor = 16384.0f;

  // Codes i and i + 4 of a word, divided by kDivisor. A sum serves two pairs.
  static HalfPairs<4> pairs(uint word) {
    HalfPairs<4> pairs;
    UNROLL for (int i = 0; i < 2; ++i) {
      const uint carried = ((i == 0 ? word << 1 : word >> 3) & 0x1e1e1e1eu) + 0x70707070u;
      pairs.v[i] = as_type<half2>((carried << 8) & 0x8e008e00u);
      pairs.v[i + 2] = as_type<half2>(carried & 0x8e008e00u);
    }
    return pairs;
  }
};

struct E4M3 {
  static constant constexpr int kBits = 8;
  static constant constexpr float kDivisor = 256.0f;

  // Codes i and i + 2 of a word, divided by kDivisor.
  static HalfPairs<2> pairs(uint word) {
    HalfPairs<2> pairs;
    UNROLL for (int i = 0; i < 2; ++i) {
      const uint carried = ((i == 0 ? word << 7 : word >> 1) & 0x7f807f80u) + 0x40004000u;
      pairs.v[i] = as_type<half2>(carried & 0xbf80bf80u);
    }
    return pairs;
  }
};

// Scales as a power of two for the codes, in half, and a factor. 2^(scale - 127) is no normal float for 0:
// its codes are halved instead.
struct ScaleE8M0 {
  typedef uchar Stored;
  static float of_codes(uchar scale) { return scale == 0 ? 0.5f : 1.0f; }
  static float factor(uchar scale) { return as_type<float>(max(uint(scale), 1u) << 23); }
};

struct ScaleE4M3 {
  typedef uchar Stored;
  static float of_codes(uchar) { return 1.0f; }
  static float factor(uchar scale) {
    const uint bits = uint(scale & 0x80) << 8 | uint(scale & 0x7f) << 7;
    return float(as_type<half>(ushort(bits)) * half(E4M3::kDivisor));
  }
};

struct ScaleFP32 {
  typedef float Stored;
  static float of_codes(float) { return 1.0f; }
  static float factor(float scale) { return scale; }
};

// Floats of 4 or 8 bits with a scale for each group.
template <typename T, typename Code, typename CodeScale, int kGroup>
struct FloatCodes {
  typedef T Element;
  typedef PackedRows<Code::kBits, kGroup> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = kGroup < 32 ? kGroup : 32, kTileValues = 16, kPackSize = 8,
                                kGroups = 1;
  static constant constexpr int kPlaceBytes = 0;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr int kCodePairs = 16 / Code::kBits;  // of a word

  template <int N>
  struct Chunk {
    Words<N * Code::kBits / 32> words;
    typename CodeScale::Stored scale;
  };

  Rows rows;
  device const typename CodeScale::Stored* scales;

  FloatCodes(device const uchar* packed, device const uchar* scales_, device const uchar*, uint expert,
             constant MatmulParams& params)
      : rows(packed, expert, params),
        scales(reinterpret_cast<device const typename CodeScale::Stored*>(scales_) + rows.first_unit) {}

  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Chunk<N> load(Row row, uint column, uint) const {
    return {rows.template load<N>(row, column), scales[row.unit + column / kGroup]};
  }

  static FragmentElement place_of(int value) { return HalfCodes<Code::kBits>::place_of(value); }
  template <int N>
  static HalfPairs<kCodePairs> code_pairs(Chunk<N> chunk, int word) {
    const half2 factor = half2(half(Code::kDivisor * CodeScale::of_codes(chunk.scale)));
    HalfPairs<kCodePairs> pairs = Code::pairs(chunk.words.v[word]);
    UNROLL for (int i = 0; i < kCodePairs; ++i) pairs.v[i] *= factor;
    return pairs;
  }

  static Pack<kPackSize> codes(Chunk<kValues> chunk, int pack) {
    constexpr int kWords = kPackSize / 2 / kCodePairs;
    half2 pairs[kPackSize / 2];
    UNROLL for (int word = 0; word < kWords; ++word) {
      const HalfPairs<kCodePairs> codes = code_pairs(chunk, kWords * pack + word);
      UNROLL for (int i = 0; i < kCodePairs; ++i) pairs[kCodePairs * word + i] = codes.v[i];
    }
    return in_order<kPackSize, HalfCodes<Code::kBits>>(pairs);
  }
  static void add_inputs(Pack<kPackSize>, thread InputSums&) {}
  static float excess(InputSums) { return 0.0f; }
  static void add_dot(Chunk<kValues> chunk, int, float dot, InputSums, thread float& total) {
    total = fma(CodeScale::factor(chunk.scale), dot, total);
  }

  template <int N>
  static float2 values(Chunk<N> chunk, int number) {
    const half2 codes = code_pairs(chunk, number / kCodePairs).v[number % kCodePairs];
    const float factor = CodeScale::factor(chunk.scale);
    return float2(float(codes.x) * factor, float(codes.y) * factor);
  }
};

// Rows in format W with a float factor each, in the place of biases.
template <typename W>
struct ScaledRows {
  typedef typename W::Element Element;
  static constant constexpr int kValues = W::kValues, kTileValues = W::kTileValues, kPackSize = W::kPackSize,
                                kGroups = W::kGroups;
  static constant constexpr int kPlaceBytes = W::kPlaceBytes;
  static constant constexpr bool kAnyLength = W::kAnyLength;

  struct Row {
    typename W::Row codes;
    float factor;
  };
  template <int N>
  struct Chunk {
    typename W::template Chunk<N> codes;
    float factor;
  };

  W weights;
  device const float* factors;

  ScaledRows(device const uchar* packed, device const uchar* scales, device const uchar* biases, uint expert,
             constant MatmulParams& params)
      : weights(packed, scales, biases, expert, params),
        factors(reinterpret_cast<device const float*>(biases) + ulong(expert) * params.rows) {}

  Row row(uint number) const { return {weights.row(number), factors[number]}; }
  template <int N>
  Chunk<N> load(Row row, uint column, uint left) const {
    return {weights.template load<N>(row.codes, column, left), row.factor};
  }

  static FragmentElement place_of(int value) { return W::place_of(value); }
  static Pack<kPackSize> codes(Chunk<kValues> chunk, int pack) { return W::codes(chunk.codes, pack); }
  static void add_inputs(Pack<kPackSize> inputs, thread InputSums& sums) { W::add_inputs(inputs, sums); }
  static float excess(InputSums sums) { return W::excess(sums); }
  static void add_dot(Chunk<kValues> chunk, int group, float dot, InputSums sums, thread float& total) {
    W::add_dot(chunk.codes, group, dot * chunk.factor, sums, total);
  }
  template <int N>
  static float2 values(Chunk<N> chunk, int number) {
    return W::values(chunk.codes, number) * chunk.factor;
  }
};
