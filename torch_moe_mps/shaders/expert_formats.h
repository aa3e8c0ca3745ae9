// The formats of an expert's matrix behind one interface. A lane handles `kOctets` times 8 consecutive values of a row at a time:
//
//   Weights::Chunk chunk = weights.load(row, column);      the bits, and the scale and bias of their group
//   Pack<8> values = weights.octet(chunk, i);              values 8 i .. 8 i + 7, dequantised
//
// and for products with few inputs, where dequantising costs as much as multiplying:
//
//   Pack<8> codes = weights.codes(chunk, i);               what `scaled` makes values of
//   InputSums sums; sums.add(input, ...);                  of the same inputs
//   float dot = weights.scaled(chunk, dot_of_codes, sums);
//
// Groups have at least 32 values and a chunk at most 32, so a chunk has one scale. The offset of an expert takes 64 bits; within its
// matrix 32 are enough.
#pragma once
#include "common.h"

template <int N>
struct Words {
  uint v[N];
};

// Loads of 16 bytes, or one of 8.
template <int N>
inline Words<N> load_words(device const uint* source) {
  Words<N> words;
  if constexpr (N == 2) {
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

// Sums of the inputs that meet the i-th, i + 3rd, ... value of an octet (or i + 2nd: the period is that of AffineWeights::offset).
struct InputSums {
  float v[3];

  InputSums() {
    UNROLL for (int i = 0; i < 3; ++i) v[i] = 0.0f;
  }

  template <int kPeriod>
  void add(Pack<8> inputs) {
    UNROLL for (int i = 0; i < 8; ++i) v[i % kPeriod] += inputs.v[i];
  }
};

inline uint shifted(uint word, int left) { return left >= 0 ? word << left : word >> -left; }

// [E, rows, inputs] in T; rows of any length.
template <typename T>
struct DenseWeights {
  typedef T Element;
  typedef Octet<T> Chunk;
  static constant constexpr int kOctets = 1;
  static constant constexpr bool kTransposed = false;
  static constant constexpr bool kAnyLength = true;

  device const T* values;
  uint inputs;
  bool vectorised;

  DenseWeights(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
               constant ExpertParams& params)
      : values(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        inputs(params.inputs),
        vectorised(params.vectorised != 0) {}

  Chunk load(uint row, uint column) const {
    return load_octet(values + row * inputs + column, inputs - column, vectorised);
  }

  Pack<8> octet(Chunk chunk, int) const { return chunk.values(); }
  Pack<8> codes(Chunk chunk, int) const { return chunk.values(); }
  static constant constexpr int kPeriod = 0;  // needs no sums of the inputs
  float scaled(Chunk, float dot, InputSums) const { return dot; }
};

// [E, inputs, rows] in T: the input dimension first.
template <typename T>
struct DenseColumns {
  typedef T Element;
  static constant constexpr bool kTransposed = true;

  device const T* values;
  uint rows;

  DenseColumns(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
               constant ExpertParams& params)
      : values(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        rows(params.rows) {}

  T at(uint row, uint column) const { return values[column * rows + row]; }
};

// q * scale + bias, q of kBits bits. The bits of q are put into the mantissa of a float whose last place is 1, which makes it
// offset + q without a conversion: conversions of integers run at a quarter of the rate of other instructions.
template <typename T, int kBits, int kOctetCount>
struct AffineWeights {
  typedef T Element;
  static constant constexpr int kOctets = kOctetCount;
  static constant constexpr bool kTransposed = false;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr int kWordsPerOctet = kBits / 4;
  static constant constexpr int kValuesPerWord = 32 / kBits;
  // One shifted word serves three nibbles, at offsets 4096, 256 and 16, or two bytes, at offsets 65536 and 256. What an offset
  // costs, 2^-24 of it, is less than 1e-4 of q's range and below the rounding of 16-bit activations; for float
  // activations each value is shifted to the smallest offset.
  static constant constexpr int kPeriod = sizeof(T) == 4 ? 1 : (kBits == 4 ? 3 : 2);
  static constant constexpr int kLastPlace = kBits == 4 ? 19 : 15;  // of q's lowest bit: the highest that the mantissa allows

  struct Chunk {
    Words<kOctetCount * kWordsPerOctet> words;
    T scale;
    T bias;
  };

  device const uint* packed;
  device const T* scales;
  device const T* biases;
  uint words_per_row;
  uint groups_per_row;
  uint group_shift;

  AffineWeights(device const uchar* packed_, device const uchar* scales_, device const uchar* biases_, uint expert,
                constant ExpertParams& params)
      : words_per_row(params.inputs / kValuesPerWord),
        groups_per_row(params.inputs >> params.group_shift),
        group_shift(params.group_shift) {
    const ulong row = ulong(expert) * params.rows;
    packed = reinterpret_cast<device const uint*>(packed_) + row * words_per_row;
    scales = reinterpret_cast<device const T*>(scales_) + row * groups_per_row;
    biases = reinterpret_cast<device const T*>(biases_) + row * groups_per_row;
  }

  Chunk load(uint row, uint column) const {
    Chunk chunk;
    chunk.words = load_words<kOctetCount * kWordsPerOctet>(packed + row * words_per_row + column / kValuesPerWord);
    const uint group = row * groups_per_row + (column >> group_shift);
    chunk.scale = scales[group];
    chunk.bias = biases[group];
    return chunk;
  }

  static constexpr int place(int i) { return kLastPlace - kBits * (kPeriod - 1 - i % kValuesPerWord % kPeriod); }
  static constexpr float offset(int i) { return float(1 << (23 - place(i))); }

  // offset(i) + q
  Pack<8> codes(Chunk chunk, int index) const {
    Pack<8> pack;
    UNROLL for (int i = 0; i < 8; ++i) {
      const int at = place(i);
      const uint word = chunk.words.v[index * kWordsPerOctet + i / kValuesPerWord];
      const uint bits = shifted(word, at - kBits * (i % kValuesPerWord)) & (((1u << kBits) - 1u) << at);
      pack.v[i] = as_type<float>((uint(127 + 23 - at) << 23) | bits);
    }
    return pack;
  }

  Pack<8> octet(Chunk chunk, int index) const {
    const float scale = float(chunk.scale);
    const float bias = float(chunk.bias);
    Pack<8> pack = codes(chunk, index);
    UNROLL for (int i = 0; i < 8; ++i) pack.v[i] = fma(pack.v[i], scale, fma(-offset(i), scale, bias));
    return pack;
  }

  float scaled(Chunk chunk, float dot, InputSums inputs) const {
    float total = 0.0f;
    UNROLL for (int i = 0; i < kPeriod; ++i) {
      dot = fma(-offset(i), inputs.v[i], dot);
      total += inputs.v[i];
    }
    return fma(float(chunk.bias), total, float(chunk.scale) * dot);
  }
};

// e2m1 values with an e8m0 scale for each 32. The value's bits, moved to the top of a half's exponent and mantissa, are the value
// times 2^-14, subnormals included.
template <typename T, int kOctetCount>
struct Mxfp4Weights {
  typedef T Element;
  static constant constexpr int kOctets = kOctetCount;
  static constant constexpr bool kTransposed = false;
  static constant constexpr bool kAnyLength = false;

  struct Chunk {
    Words<kOctetCount> words;
    uchar scale;
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

  Chunk load(uint row, uint column) const {
    Chunk chunk;
    chunk.words = load_words<kOctetCount>(packed + row * words_per_row + column / 8);
    chunk.scale = scales[row * groups_per_row + column / 32];
    return chunk;
  }

  static constant constexpr int kPeriod = 0;

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

  // In two steps: 2^14 times the largest scale is no float.
  float scaled(Chunk chunk, float dot, InputSums) const {
    const uint exponent = chunk.scale;
    return dot * 16384.0f * as_type<float>(exponent == 0 ? 0x00400000u : exponent << 23);
  }

  Pack<8> octet(Chunk chunk, int index) const {
    Pack<8> pack = codes(chunk, index);
    UNROLL for (int i = 0; i < 8; ++i) pack.v[i] = scaled(chunk, pack.v[i], InputSums());
    return pack;
  }
};
