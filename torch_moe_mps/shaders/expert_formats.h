// The formats of an expert's matrix behind one interface. A lane handles `kOctets` times 8 consecutive values
// of a row at a time:
//
//   Chunk chunk = weights.load(weights.at(row), column);  the bits, the scale and bias of their group
//   Pack<8> values = weights.octet(chunk, i);              values 8 i .. 8 i + 7, dequantised
//
// Formats with kTwoSteps load so in decode:
//
//   Part part = weights.load_part(weights.at(row), column, active);
//   Chunk chunk = weights.whole(part);
//
// and for products with few inputs, where dequantising costs as much as multiplying:
//
//   Pack<8> coded = Weights::coded(input, sums);
//   Pack<8> codes = weights.codes(chunk, i);               dot(codes, coded) over a chunk ...
//   float dot = weights.scaled(chunk, dot_of_codes, sums); ... gives that of the values and the inputs
//
// The affine formats also go from row to row, in expert_pair.h; the lanes of a group load its scale and its
// bias once and exchange them:
//
//   Cursor cursor = weights.cursor(row, column);
//   weights.load(part, cursor, lane, active);
//   Chunk chunk = weights.shared(part, lane);
//   cursor = weights.advanced(cursor, rows);
//
// Groups have at least 32 values and a chunk lies in one group, so it has one scale. The offset of an expert
// takes 64 bits; within its matrix 32 are enough.
#pragma once
#include "common.h"

template <int N>
struct Words {
  uint v[N];
};

// Loads of 16 bytes, or one of 4 or 8.
template <int N>
inline Words<N> load_words(device const uint* source) {
  Words<N> words;
  if constexpr (N == 1) {
    words.v[0] = *source;
  } else if constexpr (N == 2) {
    const uint2 pair = *reinterpret_cast<device const uint2*>(source);
    words.v[0] = pair.x;
    words.v[1] = pair.y;
  } else {
    UNROLL for (int i = 0; i < N / 4; ++i) {
      const uint4 four = reinterpret_cast<device const uint4*>(source)[i];
      UNROLL for (int j = 0; j < 4; ++j) words.v[4 * i + j] = four[j];
    }
  }
  return words;
}

// Eight elements of a dense row; what lies at or beyond `left` is zero.
template <typename T>
struct Octet {
  Words<2 * sizeof(T)> words;

  Pack<8> values() const {
    Pack<8> pack;
    if constexpr (sizeof(T) == 4) {
      UNROLL for (int i = 0; i < 8; ++i) pack.v[i] = as_type<float>(words.v[i]);
    } else {
      UNROLL for (int i = 0; i < 4; ++i) {
        const vec<T, 2> pair = as_type<vec<T, 2>>(words.v[i]);
        pack.v[2 * i] = float(pair.x);
        pack.v[2 * i + 1] = float(pair.y);
      }
    }
    return pack;
  }
};

template <typename T>
inline Octet<T> load_octet(device const T* source, uint left, bool vectorised) {
  Octet<T> octet;
  if (vectorised) {
    octet.words = load_words<2 * sizeof(T)>(reinterpret_cast<device const uint*>(source));
    return octet;
  }
  constexpr int kPerWord = 4 / sizeof(T);
  UNROLL for (int i = 0; i < int(2 * sizeof(T)); ++i) {
    vec<T, 2> pair = vec<T, 2>(T(0.0f));
    UNROLL for (int j = 0; j < kPerWord; ++j) {
      if (uint(kPerWord * i + j) < left) pair[j] = source[kPerWord * i + j];
    }
    if constexpr (sizeof(T) == 4) {
      octet.words.v[i] = as_type<uint>(pair.x);
    } else {
      octet.words.v[i] = as_type<uint>(pair);
    }
  }
  return octet;
}

// Sums of the inputs, those apart that meet codes of different places.
struct InputSums {
  float v[2];
};

inline uint shifted(uint word, int left) {
  return left >= 0 ? word << left : word >> -left;
}

// [E, rows, inputs] in T; rows of any length.
template <typename T>
struct DenseWeights {
  typedef T Element;
  typedef Octet<T> Chunk;
  static constant constexpr int kOctets = 1;
  static constant constexpr bool kAnyLength = true;
  static constant constexpr bool kTwoSteps = false;

  device const T* values;
  uint inputs;
  bool vectorised;

  DenseWeights(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
               constant ExpertParams& params)
      : values(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        inputs(params.inputs),
        vectorised(params.vectorised != 0) {}

  typedef uint Row;
  Row at(uint row) const { return row * inputs; }
  Chunk load(Row row, uint column) const {
    return load_octet(values + (row + column), inputs - column, vectorised);
  }

  Pack<8> octet(Chunk chunk, int) const { return chunk.values(); }
  Pack<8> codes(Chunk chunk, int) const { return chunk.values(); }
  static Pack<8> coded(Pack<8> inputs, thread InputSums&) { return inputs; }
  float scaled(Chunk, float dot, InputSums) const { return dot; }
};

// [E, inputs, rows] in T: the input dimension first.
template <typename T>
struct DenseColumns {
  typedef T Element;
  device const T* values;
  uint rows;

  DenseColumns(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
               constant ExpertParams& params)
      : values(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        rows(params.rows) {}

  T at(uint row, uint column) const { return values[column * rows + row]; }
};

// Codes of kBits bits in pairs that lie 16 bits apart, as the mantissas of two halves with a fixed exponent:
// numbers without a conversion from integers, and with few integer operations, both of which run below the
// rate of other instructions. A nibble may lie at place 0 or 4 of the mantissa, so that one shifted word
// serves two pairs of them. The exponent is that for which the code counts units: the halves are 1024 + q and
// 64 + q.
template <int kBits>
struct HalfCodes {
  static constant constexpr int kCodePairs = 16 / kBits;  // of a word: codes i and i + kCodePairs
  static constant constexpr int kMantissaPlaces = kBits == 4 ? 2 : 1;

  uint masks[kMantissaPlaces];

  // The bits come at run time so that the masks stay in registers: as literals they were moved there for each
  // use, one instruction in ten of the decode kernels (NVRTC).
  HalfCodes(uint bits) {
    UNROLL for (int i = 0; i < kMantissaPlaces; ++i) masks[i] = ((1u << bits) - 1) * 0x00010001u
                                                                << (kBits * i);
  }

  static constexpr float offset(int i) { return i % kMantissaPlaces == 0 ? 1024.0f : 64.0f; }

  half2 pair(uint word, int i) const {
    const uint exponents = i % kMantissaPlaces == 0 ? 0x64006400u : 0x54005400u;
    return as_type<half2>((word >> (kBits * (i - i % kMantissaPlaces)) & masks[i % kMantissaPlaces]) |
                          exponents);
  }
};

// q * scale + bias, q of kBits bits.
template <typename T, int kBits, int kOctetCount>
struct AffineWeights {
  typedef T Element;
  static constant constexpr int kOctets = kOctetCount;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr bool kTwoSteps = true;
  static constant constexpr int kWordsPerOctet = kBits / 4;
  static constant constexpr int kValuesPerWord = 32 / kBits;
  // Relative to q the offset is at most 2^10; what it costs, 2^-24 of it, is less than 1e-5 of q's range and
  // below the rounding of 16-bit activations. For float activations it is subtracted first.
  static constant constexpr bool kExact = sizeof(T) == 4;

  struct Chunk {
    Words<kOctetCount * kWordsPerOctet> words;
    float scale;
    float bias;
  };

  // As loaded.
  struct Part {
    Words<kOctetCount * kWordsPerOctet> words;
    T scale;
    T bias;
  };

  typedef uint Row;  // its first word

  device const uint* packed;
  device const T* scales;
  device const T* biases;
  uint words_per_row;
  uint group_shift;  // of words
  uint other_lanes;  // of a group, a power of two less one
  HalfCodes<kBits> half_codes;

  AffineWeights(device const uchar* packed_, device const uchar* scales_, device const uchar* biases_,
                uint expert, constant ExpertParams& params)
      : words_per_row(params.inputs / kValuesPerWord),
        group_shift(params.group_shift - (kBits == 4 ? 3 : 2)),
        other_lanes((1u << params.group_shift) / (8 * kOctetCount) - 1),
        half_codes(params.bits) {
    const ulong row = ulong(expert) * params.rows;
    packed = reinterpret_cast<device const uint*>(packed_) + row * words_per_row;
    scales = reinterpret_cast<device const T*>(scales_) + row * (words_per_row >> group_shift);
    biases = reinterpret_cast<device const T*>(biases_) + row * (words_per_row >> group_shift);
  }

  // Rows have whole groups, so that the number of a word tells its group.
  Row at(uint row) const { return row * words_per_row; }

  Chunk load(Row row, uint column) const {
    const uint word = row + column / kValuesPerWord;
    Chunk chunk;
    chunk.words = load_words<kOctetCount * kWordsPerOctet>(packed + word);
    chunk.scale = float(scales[word >> group_shift]);
    chunk.bias = float(biases[word >> group_shift]);
    return chunk;
  }

  Part load_part(Row row, uint column, bool active) const {
    const uint word = row + column / kValuesPerWord;
    Part part = {};
    if (active) part.words = load_words<kOctetCount * kWordsPerOctet>(packed + word);
    if (active) part.scale = scales[word >> group_shift];
    if (active) part.bias = biases[word >> group_shift];
    return part;
  }

  Chunk whole(Part part) const { return {part.words, float(part.scale), float(part.bias)}; }

  // A lane's place in a row.
  struct Cursor {
    device const uint* words;
    device const T* scale;
    device const T* bias;
  };

  Cursor cursor(uint row, uint column) const {
    const uint word = at(row) + column / kValuesPerWord;
    return {packed + word, scales + (word >> group_shift), biases + (word >> group_shift)};
  }

  Cursor advanced(Cursor cursor, uint rows) const {
    const uint groups = rows * (words_per_row >> group_shift);
    return {cursor.words + rows * words_per_row, cursor.scale + groups, cursor.bias + groups};
  }

  // In place of `part`, whose words stay what they were in a lane that is not active; scale and bias become
  // zeros.
  void load(thread Part& part, Cursor cursor, uint lane, bool active) const {
    const bool first = (lane & other_lanes) == 0, last = (lane & other_lanes) == other_lanes;
    part.scale = T(0.0f);
    part.bias = T(0.0f);
    if (active) part.words = load_words<kOctetCount * kWordsPerOctet>(cursor.words);
    if (active && first) part.scale = *cursor.scale;
    if (active && last) part.bias = *cursor.bias;
  }

  Chunk shared(Part part, uint lane) const {
    Chunk chunk = whole(part);
    if (other_lanes != 0) {
      chunk.scale = simd_shuffle(chunk.scale, ushort(lane & ~other_lanes));
      chunk.bias = simd_shuffle(chunk.bias, ushort(lane | other_lanes));
    }
    return chunk;
  }

  static constexpr float offset(int i) { return kExact ? 0.0f : HalfCodes<kBits>::offset(i); }

  static Pack<8> coded(Pack<8> inputs, thread InputSums& sums) {
    UNROLL for (int i = 0; i < 8; ++i) {
      sums.v[i % HalfCodes<kBits>::kCodePairs % HalfCodes<kBits>::kMantissaPlaces] += inputs.v[i];
    }
    return inputs;
  }

  Pack<8> codes(Chunk chunk, int index) const {
    constexpr int kCodePairs = HalfCodes<kBits>::kCodePairs;
    Pack<8> pack;
    UNROLL for (int w = 0; w < kWordsPerOctet; ++w) {
      const uint word = chunk.words.v[index * kWordsPerOctet + w];
      UNROLL for (int i = 0; i < kCodePairs; ++i) {
        half2 pair = half_codes.pair(word, i);
        if constexpr (kExact) pair = pair - half2(half(HalfCodes<kBits>::offset(i)));
        pack.v[w * kValuesPerWord + i] = float(pair.x);
        pack.v[w * kValuesPerWord + i + kCodePairs] = float(pair.y);
      }
    }
    return pack;
  }

  float scaled(Chunk chunk, float dot, InputSums inputs) const {
    float plain = inputs.v[0];
    if constexpr (!kExact) dot = fma(-offset(0), inputs.v[0], dot);
    if constexpr (HalfCodes<kBits>::kMantissaPlaces == 2) {
      plain += inputs.v[1];
      if constexpr (!kExact) dot = fma(-offset(1), inputs.v[1], dot);
    }
    return fma(chunk.bias, plain, chunk.scale * dot);
  }

  Pack<8> octet(Chunk chunk, int index) const {
    Pack<8> pack = codes(chunk, index);
    UNROLL for (int i = 0; i < 8; ++i) {
      const float rest = fma(-offset(i % HalfCodes<kBits>::kCodePairs), chunk.scale, chunk.bias);
      pack.v[i] = fma(pack.v[i], chunk.scale, rest);
    }
    return pack;
  }
};

// e2m1 values with an e8m0 scale for each 32. The value's bits, moved to the top of a half's exponent and
// mantissa, are the value times 2^-14, subnormals included.
template <typename T, int kOctetCount>
struct Mxfp4Weights {
  typedef T Element;
  static constant constexpr int kOctets = kOctetCount;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr bool kTwoSteps = false;

  struct Chunk {
    Words<kOctetCount> words;
    uchar scale;
  };

  struct Row {
    uint word;
    uint group;
  };

  device const uint* packed;
  device const uchar* scales;
  uint words_per_row;
  uint groups_per_row;

  Mxfp4Weights(device const uchar* packed_, device const uchar* scales_, device const uchar*, uint expert,
               constant ExpertParams& params)
      : words_per_row(params.inputs / 8), groups_per_row(params.inputs / 32) {
    const ulong row = ulong(expert) * params.rows;
    packed = reinterpret_cast<device const uint*>(packed_) + row * words_per_row;
    scales = scales_ + row * groups_per_row;
  }

  Row at(uint row) const { return {row * words_per_row, row * groups_per_row}; }

  Chunk load(Row row, uint column) const {
    Chunk chunk;
    chunk.words = load_words<kOctetCount>(packed + (row.word + column / 8));
    chunk.scale = scales[row.group + column / 32];
    return chunk;
  }

  static Pack<8> coded(Pack<8> inputs, thread InputSums&) { return inputs; }

  Pack<8> codes(Chunk chunk, int index) const {
    const uint word = chunk.words.v[index];
    Pack<8> pack;
    UNROLL for (int i = 0; i < 4; ++i) {  // nibbles i and i + 4 lie 16 bits apart: one half2
      const uint signs = shifted(word, 12 - 4 * i) & 0x80008000u;
      const uint magnitudes = shifted(word, 9 - 4 * i) & 0x0e000e00u;
      const half2 values = as_type<half2>(signs | magnitudes);
      pack.v[i] = float(values.x);
      pack.v[i + 4] = float(values.y);
    }
    return pack;
  }

  // In two steps: 2^14 times the largest scale is no float, and the smallest, 2^-127, is subnormal: zero on a
  // GPU.
  float scaled(Chunk chunk, float dot, InputSums) const {
    const uint exponent = chunk.scale;
    return dot * (exponent == 0 ? 8192.0f : 16384.0f) * as_type<float>(max(exponent, 1u) << 23);
  }

  Pack<8> octet(Chunk chunk, int index) const {
    Pack<8> pack = codes(chunk, index);
    const InputSums none = {{0.0f, 0.0f}};
    UNROLL for (int i = 0; i < 8; ++i) pack.v[i] = scaled(chunk, pack.v[i], none);
    return pack;
  }
};
