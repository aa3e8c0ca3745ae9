// The formats of a matrix behind one interface, for kernels that read its rows.
//
// A chunk is N consecutive values of a row. A lane takes chunks of W::kValues values for dot products, with
// W::kGroups scales for as many equal parts, and of W::kTileValues for tiles:
//
//   row(number)                         Row: where a row begins
//   load<N>(row, column, left)          Chunk<N>: its bits and scales; `left` values remain to the row's end
//   codes(chunk, pack)                  Pack<kPackSize>: kPackSize of its codes, as floats
//   excess(sums)                        float: what codes() adds to the dot product of codes and inputs
//   add_dot(chunk, group, dot, sums,    adds the dot product of a group's values and inputs, from that of its
//           total)                      codes and inputs
//   values(chunk, number)               float2: the two values that a lane has in a fragment of a tile
//   place_of(value)                     FragmentElement: which fragment, and which of the two
//
// codes() may add a constant to integer codes; `sums` of the inputs are what add_inputs() collected. An
// expert's address takes 64 bits, an index within its matrix 32.
#pragma once
#include "matmul/common.h"

// N elements of a dense row; elements from `left` on are zero.
template <typename T, int N>
struct Elements {
  static constant constexpr int kPerWord = 4 / sizeof(T);
  Words<N / kPerWord> words;

  float at(int i) const {
    if constexpr (sizeof(T) == 4) {
      return as_type<float>(words.v[i]);
    } else {
      return float(as_type<vec<T, 2>>(words.v[i / 2])[i % 2]);
    }
  }
};

inline uint word_of(float2 pair) {
  return as_type<uint>(pair.x);
}
inline uint word_of(half2 pair) {
  return as_type<uint>(pair);
}
inline uint word_of(bfloat2 pair) {
  return as_type<uint>(pair);
}

template <int N, typename T>
inline Elements<T, N> load_elements(device const T* source, uint left, bool vectorised) {
  constexpr int kPerWord = Elements<T, N>::kPerWord;
  Elements<T, N> elements;
  if (vectorised) {
    elements.words = load_words<N / kPerWord>(reinterpret_cast<device const uint*>(source));
    return elements;
  }
  UNROLL for (int i = 0; i < N / kPerWord; ++i) {
    vec<T, 2> pair = vec<T, 2>(T(0.0f));
    UNROLL for (int j = 0; j < kPerWord; ++j) {
      if (uint(kPerWord * i + j) < left) pair[j] = source[kPerWord * i + j];
    }
    elements.words.v[i] = word_of(pair);
  }
  return elements;
}

// Sums of the inputs, one for each constant that is added to the codes they meet.
struct InputSums {
  float v[2];
};

// Where a value of a chunk goes: the number of a fragment, and `element` 0 or 1 of the lane's two in it.
struct FragmentElement {
  int number, element;
};

// [E, rows, inputs] in T; rows of any length.
template <typename T>
struct Dense {
  typedef T Element;
  static constant constexpr int kValues = 32 / sizeof(T), kTileValues = kValues, kPackSize = 8, kGroups = 1;
  static constant constexpr bool kAnyLength = true;

  template <int N>
  struct Chunk {
    Elements<T, N> elements;
  };
  typedef uint Row;

  device const T* matrix;
  uint inputs;
  bool vectorised;

  Dense(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
        constant MatmulParams& params)
      : matrix(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        inputs(params.inputs),
        vectorised(params.vectorised != 0) {}

  Row row(uint number) const { return number * inputs; }
  template <int N>
  Chunk<N> load(Row row, uint column, uint left) const {
    return {load_elements<N>(matrix + (row + column), left, vectorised)};
  }

  static Pack<8> codes(Chunk<kValues> chunk, int pack) {
    Pack<8> result;
    UNROLL for (int i = 0; i < 8; ++i) result.v[i] = chunk.elements.at(8 * pack + i);
    return result;
  }
  static void add_inputs(Pack<8>, thread InputSums&) {}
  static float excess(InputSums) { return 0.0f; }
  static void add_dot(Chunk<kValues>, int, float dot, InputSums, thread float& total) { total += dot; }

  static FragmentElement place_of(int value) { return {value / 2, value % 2}; }
  static float2 values(Chunk<kTileValues> chunk, int number) {
    return float2(chunk.elements.at(2 * number), chunk.elements.at(2 * number + 1));
  }
};

// Rows of kBits-bit codes, the first value in the lowest bits, with scales for each kUnit values.
template <int kBits, int kUnit>
struct PackedRows {
  struct Row {
    uint word, unit;
  };

  device const uint* words;
  ulong first_unit;  // of the matrix
  uint words_per_row, units_per_row;

  PackedRows(device const uchar* packed, uint expert, constant MatmulParams& params)
      : words_per_row(params.inputs / 16 * kBits / 2), units_per_row(params.inputs / kUnit) {
    const ulong row = ulong(expert) * params.rows;
    words = reinterpret_cast<device const uint*>(packed) + row * words_per_row;
    first_unit = row * units_per_row;
  }

  Row row(uint number) const { return {number * words_per_row, number * units_per_row}; }
  // The words of N values from `column` on, which is a multiple of N: their bits fill words.
  template <int N>
  Words<N * kBits / 32> load(Row row, uint column) const {
    return load_words<N * kBits / 32>(words + (row.word + column / 16 * kBits / 2));
  }
};

// The 32 bits from `bit` on, which is at least -32. Those outside of the words are arbitrary.
template <int kWords>
inline uint bits_from(Words<kWords> words, int bit) {
  const int end = bit + 32, word = end / 32, shift = end % 32;
  const uint low = words.v[max(word - 1, 0)], high = words.v[min(word, kWords - 1)];
  return low >> shift | (high << (31 - shift)) << 1;
}

// Unsigned codes, two at a time (a code pair), as the mantissas of two halves with a fixed exponent: this
// needs no conversion from integers, which takes four cycles on Apple's GPUs. The codes of a pair are about
// 16 bits apart, so that one shift and one mask extract both. Where they are not exactly 16 bits apart, one
// of them is raised: it stays kRaised bits up in its half. Where they are, and two codes fit into a mantissa,
// one shift serves two pairs, and both codes of the second are raised. The exponent is chosen so that the
// lowest bit of a code counts 1: a half is added(height) + code.
template <int kBits>
struct HalfCodes {
  static constant constexpr int kCodePairs = kBits == 2 ? 8 : kBits < 6 ? 4 : 2;  // of a run of codes
  static constant constexpr int kApart = kCodePairs * kBits;  // bits from a code to the other of its pair
  static constant constexpr bool kSharesShifts = kApart == 16 && 2 * kBits <= 10;
  static constant constexpr int kRaised = kSharesShifts ? kBits : kApart < 16 ? 16 - kApart : kApart - 16;
  static constant constexpr int kHeights = kRaised > 0 ? 2 : 1;

  // 1 for a code that is raised, else 0.
  static int height(int pair, int element) {
    return kSharesShifts ? pair % 2 : kApart < 16 ? 1 - element : kApart > 16 ? element : 0;
  }
  static float added(int height) { return float(1024 >> (height * kRaised)); }

  static FragmentElement place_of(int value) {
    const int run = value / (2 * kCodePairs), in_run = value % (2 * kCodePairs);
    return {run * kCodePairs + in_run % kCodePairs, in_run / kCodePairs};
  }

  template <int kWords>
  static half2 pair(Words<kWords> words, int pair) {
    const int first = kRaised * height(pair, 0), second = kRaised * height(pair, 1);
    const int code = pair / kCodePairs * 2 * kCodePairs + pair % kCodePairs;
    const uint mask = (1u << kBits) - 1, masks = mask << first | mask << second << 16;
    const uint exponents = 0x64006400u - uint(first) * 0x400u - uint(second) * 0x4000000u;
    return as_type<half2>((bits_from(words, code * kBits - first) & masks) | exponents);
  }
};

// Puts values in order that were computed in pairs. A pair is computed whole and taken apart only here:
// otherwise LLVM splits its computation into operations on 16 bits.
template <int kCount, typename Codes, typename Pair>
inline Pack<kCount> in_order(thread const Pair* pairs) {
  Pack<kCount> pack;
  UNROLL for (int i = 0; i < kCount; ++i) {
    const FragmentElement place = Codes::place_of(i);
    pack.v[i] = float(pairs[place.number][place.element]);
  }
  return pack;
}

// Where the scales and biases of integer codes come from. A unit is kUnit values with kUnit / kGroup groups;
//
//   load<N>(unit, column)   Loaded: those of N values from `column` on, in a row that begins with `unit`
//   of<kInDots>(loaded, group)   ScaleAndBias, exact, for add_dot() or for values()
//   kPlaceBytes             what a thread keeps to find them, beyond where the row's codes are
//   kOffset                 what is subtracted from codes before they are scaled; if not 0, biases are 0
struct ScaleAndBias {
  float scale, bias;
};

// MLX's: a scale and a bias in T for each group.
template <typename T, int kGroup_>
struct TypedScales {
  static constant constexpr int kGroup = kGroup_, kUnit = kGroup_, kPlaceBytes = 0, kOffset = 0;
  struct Loaded {
    T scale, bias;
  };

  device const T* scales;
  device const T* biases;

  TypedScales(device const uchar* scales_, device const uchar* biases_, ulong first_unit)
      : scales(reinterpret_cast<device const T*>(scales_) + first_unit),
        biases(reinterpret_cast<device const T*>(biases_) + first_unit) {}

  template <int>
  Loaded load(uint unit, uint column) const {
    return {scales[unit + column / kUnit], biases[unit + column / kUnit]};
  }
  template <bool>
  static ScaleAndBias of(Loaded loaded, int) {
    return {float(loaded.scale), float(loaded.bias)};
  }
};

// ggml's for 32 values: a half, and without an offset another one.
template <int kOffset_>
struct HalfScales {
  static constant constexpr int kGroup = 32, kUnit = 32, kPlaceBytes = 0, kOffset = kOffset_;
  struct Loaded {
    half scale, bias;
  };

  device const half* scales;
  device const half* biases;

  HalfScales(device const uchar* scales_, device const uchar* biases_, ulong first_unit)
      : scales(reinterpret_cast<device const half*>(scales_) + first_unit),
        biases(reinterpret_cast<device const half*>(biases_) + first_unit) {}

  template <int>
  Loaded load(uint unit, uint column) const {
    if constexpr (kOffset != 0) {
      return {scales[unit + column / kUnit], 0.0h};
    } else {
      return {scales[unit + column / kUnit], biases[unit + column / kUnit]};
    }
  }
  template <bool>
  static ScaleAndBias of(Loaded loaded, int) {
    return {float(loaded.scale), float(loaded.bias)};
  }
};

// ggml's for 256 values: each group has an unsigned integer of kBits bits, less kCentre, and with kMins a
// second one; they are factors of one or two halves for the 256. The integers of a row are a stream of bits,
// the lowest first: a unit of 32 values has 6, 12 or 16 of them. With kBits = 0 a half is the scale itself.
// Types of points have other bits in the stream, 8, 12, 16 or 22 of a unit, and read them with load() alone.
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
  static constant constexpr int kPackSize = kBits == 2 ? 16 : 8;         // holds whole pairs
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

template <typename T, int kBits, int kGroup>
using Affine = Integers<T, kBits, TypedScales<T, kGroup>>;

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
  static float of_codes(uchar scale) { return scale == 0 ? 0.5f : 1.0f; }
  static float factor(uchar scale) { return as_type<float>(max(uint(scale), 1u) << 23); }
};

struct ScaleE4M3 {
  static float of_codes(uchar) { return 1.0f; }
  static float factor(uchar scale) {
    const uint bits = uint(scale & 0x80) << 8 | uint(scale & 0x7f) << 7;
    return float(as_type<half>(ushort(bits)) * half(E4M3::kDivisor));
  }
};

// Floats of 4 or 8 bits with a scale of 8 bits: mxfp4, mxfp8, nvfp4.
template <typename T, typename Code, typename CodeScale, int kGroup>
struct FloatCodes {
  typedef T Element;
  typedef PackedRows<Code::kBits, kGroup> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = kGroup, kTileValues = 16, kPackSize = 8, kGroups = 1;
  static constant constexpr int kPlaceBytes = 0;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr int kCodePairs = 16 / Code::kBits;  // of a word

  template <int N>
  struct Chunk {
    Words<N * Code::kBits / 32> words;
    uchar scale;
  };

  Rows rows;
  device const uchar* scales;

  FloatCodes(device const uchar* packed, device const uchar* scales_, device const uchar*, uint expert,
             constant MatmulParams& params)
      : rows(packed, expert, params), scales(scales_ + rows.first_unit) {}

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

// The points of the format's grid, of the host. Of two values, they are halves. Of more, a value with a sign
// has its magnitude in 8 bits, those from bit 5 on of a half that is the magnitude / 2^16; one without has
// its level in 4, -1, 0 and 1 as 0, 1 and 2. The second of two neighbours is 16 bits above the first.
#ifndef MOE_GRID
#define MOE_GRID_WORDS 1
#define MOE_GRID 0
#endif
struct alignas(8) Grid {  // so that two words are one load
  uint words[MOE_GRID_WORDS];
};
constant constexpr Grid kGrid = {{MOE_GRID}};

// level * scale, of ggml's 16 levels. A byte has two codes: it is the number of their point.
template <typename T, typename Scales>
struct LevelCodes {
  typedef T Element;
  typedef PackedRows<4, Scales::kUnit> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = 32, kTileValues = 16, kPackSize = 4, kGroups = 1;
  static constant constexpr int kPlaceBytes = Scales::kPlaceBytes;
  static constant constexpr bool kAnyLength = false;

  template <int N>
  struct Chunk {
    vec<uint, N / 8> words;  // as Words, LLVM holds them in 64 bits and in 32 at once
    typename Scales::Loaded scales;
  };

  Rows rows;
  Scales scales;

  LevelCodes(device const uchar* packed, device const uchar* scales_, device const uchar* biases, uint expert,
             constant MatmulParams& params)
      : rows(packed, expert, params), scales(scales_, biases, rows.first_unit) {}

  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Chunk<N> load(Row row, uint column, uint) const {
    device const uint* words = rows.words + (row.word + column / 8);
    return {*reinterpret_cast<device const vec<uint, N / 8>*>(words),
            scales.template load<N>(row.unit, column)};
  }

  static FragmentElement place_of(int value) { return {value / 2, value % 2}; }
  template <int N>
  static half2 levels(Chunk<N> chunk, int number) {
    return as_type<half2>(kGrid.words[chunk.words[number / 4] >> (number % 4 * 8) & 0xff]);
  }

  static Pack<kPackSize> codes(Chunk<kValues> chunk, int pack) {
    Pack<kPackSize> result;
    UNROLL for (int i = 0; i < kPackSize / 2; ++i) {
      const half2 two = levels(chunk, pack * kPackSize / 2 + i);
      result.v[2 * i] = float(two.x);
      result.v[2 * i + 1] = float(two.y);
    }
    return result;
  }
  static void add_inputs(Pack<kPackSize>, thread InputSums&) {}
  static float excess(InputSums) { return 0.0f; }
  static void add_dot(Chunk<kValues> chunk, int, float dot, InputSums, thread float& total) {
    total = fma(Scales::template of<true>(chunk.scales, 0).scale, dot, total);
  }

  template <int N>
  static float2 values(Chunk<N> chunk, int number) {
    const half2 two = levels(chunk, number);
    const float scale = Scales::template of<false>(chunk.scales, 0).scale;
    return float2(float(two.x) * scale, float(two.y) * scale);
  }
};

// Codes are numbers of points; _formats.py says where their bits are. (sign * point) * scale, or, with one
// bit a value, (point +- 1/8) * scale. Scales are (2 s + 1) times a half for 256.
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

  // What a unit has beside its numbers' lower bits and signs.
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
  // Of the grid: that of the values of a pair.
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

template <typename T>
using Mxfp4 = FloatCodes<T, E2M1, ScaleE8M0, 32>;
template <typename T>
using Mxfp8 = FloatCodes<T, E4M3, ScaleE8M0, 32>;
template <typename T>
using Nvfp4 = FloatCodes<T, E2M1, ScaleE4M3, 16>;

// GGUF's. Levels have no offset; the 1 says that they have no bias.
template <typename T>
using Q4_0 = Integers<T, 4, HalfScales<8>>;
template <typename T>
using Q4_1 = Integers<T, 4, HalfScales<0>>;
template <typename T>
using Q5_0 = Integers<T, 5, HalfScales<16>>;
template <typename T>
using Q5_1 = Integers<T, 5, HalfScales<0>>;
template <typename T>
using Q8_0 = Integers<T, 8, HalfScales<128>>;
template <typename T>
using Q2_K = Integers<T, 2, SmallScales<16, 4, true, 0, 0>>;
template <typename T>
using Q3_K = Integers<T, 3, SmallScales<16, 6, false, 32, 4>>;
template <typename T>
using Q4_K = Integers<T, 4, SmallScales<32, 6, true, 0, 0>>;
template <typename T>
using Q5_K = Integers<T, 5, SmallScales<32, 6, true, 0, 0>>;
template <typename T>
using Q6_K = Integers<T, 6, SmallScales<16, 8, false, 128, 32>>;
template <typename T>
using IQ4_NL = LevelCodes<T, HalfScales<1>>;
template <typename T>
using IQ4_XS = LevelCodes<T, SmallScales<32, 6, false, 32, 1>>;
template <typename T>
using TQ2_0 = Integers<T, 2, SmallScales<32, 0, false, 0, 1>>;
template <typename T>
using IQ1_S = GridCodes<T, 1, 32, 3, 3, 16>;
template <typename T>
using IQ1_M = GridCodes<T, 1, 16, 3, 3, 22>;
template <typename T>
using IQ2_XXS = GridCodes<T, 2, 32, 4, 0, 0>;
template <typename T>
using IQ2_XS = GridCodes<T, 2, 16, 4, 1, 8>;
template <typename T>
using IQ2_S = GridCodes<T, 2, 16, 4, 2, 16>;
template <typename T>
using IQ3_XXS = GridCodes<T, 3, 32, 4, 0, 0>;
template <typename T>
using IQ3_S = GridCodes<T, 3, 32, 4, 1, 12>;
