// Scales of ggml's blocks of 256 values.
#pragma once
#include "matmul/formats/integers.h"

// Each group has an unsigned integer of kBits bits, less kCentre, and with kMins a
// second one; they are factors of one or two halves for the 256. The integers of a row are a stream of bits,
// the lowest first: a unit of 32 values has 6, 12 or 16 of them. With kBits = 0 a half is the scale itself.
// Codebook formats have other bits in the stream, 8, 12, 16 or 22 of a unit, and read them with load() alone.
template <int kGroup_, int kBits, bool kMins, int kCentre, int kOffset_>
struct SmallScales {
  static constant constexpr int kGroup = kGroup_, kUnit = 32, kPlaceBytes = 4, kOffset = kOffset_;
  static constant constexpr int kHalves = kMins ? 2 : 1;
  static constant constexpr int kGroupBits = kBits * kHalves, kUnitBits = kGroupBits * (kUnit / kGroup);
  static constant constexpr bool kTwoBytes = kMins && kGroup < kUnit;  // one for each group of a unit
  // Aligned, so that LLVM keeps its parts apart in a chunk whose words take only 32 bits.
  struct alignas(8) Loaded {
    ushort2 integers;  // the second for kTwoBytes, and for the last 6 of 22 bits
    half factor, min_factor;
  };

  device const uchar* integers;
  device const uchar* factors;

  SmallScales(device const uchar* scales, device const uchar* biases, ulong first_unit)
      : integers(scales + first_unit * kUnitBits / 8),
        factors((kBits == 0 ? scales : biases) + first_unit * kHalves / 4) {}

  // The 6 or 12 bits of a unit are in two bytes, below others.
  template <int kCount>
  static ushort two_bytes(device const uchar* bytes, uint column) {
    const uint part = column / kUnit % 4;
    const uint first = kCount == 12 ? column / kUnit * 3 / 2 : column / 128 * 3 + part / 2;
    const uint shift = kCount == 12 ? part % 2 * 4 : part * 6 - part / 2 * 8;
    return ushort((uint(bytes[first]) | uint(bytes[first + 1]) << 8) >> shift);
  }

  // A row begins with a whole block, so that what depends on the column is the same for all rows of a lane.
  template <int N>
  Loaded load(uint unit, uint column) const {
    ushort2 own = ushort2(0);
    if constexpr (kTwoBytes && N == kGroup) {
      own.x = integers[unit * 2 + column / kGroup];
    } else if constexpr (kTwoBytes) {
      own = ushort2(reinterpret_cast<device const uchar2*>(integers)[unit + column / kUnit]);
    } else if constexpr (kUnitBits == 8) {
      own.x = integers[unit + column / kUnit];
    } else if constexpr (kUnitBits == 16) {
      own.x = reinterpret_cast<device const ushort*>(integers)[unit + column / kUnit];
    } else if constexpr (kUnitBits == 22) {  // of eight units 16 bits each, then 6 bits each
      device const uchar* block = integers + (unit / 8 + column / 256) * 22;
      own.x = reinterpret_cast<device const ushort*>(block)[column / kUnit % 8];
      own.y = two_bytes<6>(block + 16, column % 256);
    } else if constexpr (kUnitBits != 0) {
      own.x = two_bytes<kUnitBits>(integers + unit * kUnitBits / 8, column);
    }
    if (N == kGroup && kGroup < kUnit && !kTwoBytes) own.x >>= column / kGroup % 2 * kGroupBits;
    device const uchar* block = factors + (unit * kHalves / 4 + column / 256 * (2 * kHalves));
    if constexpr (kMins) {
      const half2 both = *reinterpret_cast<device const half2*>(block);
      return {own, both.x, both.y};
    } else {
      return {own, *reinterpret_cast<device const half*>(block), 0.0h};
    }
  }

  // Two neighbouring integers, as the mantissas of halves: this needs no conversion. 1024 is added to them.
  static half2 two(uint bits) {
    constexpr uint kMask = (1u << kBits) - 1;
    return as_type<half2>((bits & kMask) | (bits << (16 - kBits) & kMask << 16) | 0x64006400u);
  }
  // (integer - more) * factor, exact. In dot products the groups of a chunk share one of the products; tiles
  // have no register for it.
  template <bool kInDots>
  static float product(half integer, float more, float factor) {
    return kInDots ? fma(float(integer), factor, -more * factor) : (float(integer) - more) * factor;
  }
  template <bool kInDots>
  static ScaleAndBias of(Loaded loaded, int group) {
    const float factor = float(loaded.factor), min_factor = -float(loaded.min_factor);
    if constexpr (kBits == 0) {
      return {factor, 0.0f};
    } else if constexpr (!kMins) {
      return {product<kInDots>(two(loaded.integers.x)[group], 1024.0f + kCentre, factor), 0.0f};
    } else if constexpr (!kTwoBytes) {
      const half2 both = two(loaded.integers.x);
      return {product<kInDots>(both.x, 1024.0f, factor), product<kInDots>(both.y, 1024.0f, min_factor)};
    } else {  // of both groups at once in dot products
      typedef HalfCodes<kBits> Codes;
      const Words<1> words = {kInDots ? as_type<uint>(loaded.integers) : uint(loaded.integers[group])};
      const half scale = Codes::pair(words, 0)[kInDots ? group : 0];
      const half minimum = Codes::pair(words, 1)[kInDots ? group : 0];
      return {product<kInDots>(scale, Codes::added(0), factor),
              product<kInDots>(minimum, Codes::added(1), min_factor)};
    }
  }
};
