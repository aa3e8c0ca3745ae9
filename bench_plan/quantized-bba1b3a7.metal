
constant constexpr uint kSimdWidth = 32;
constant constexpr uint kNormThreads = 512;
constant constexpr uint kSiluThreads = 128;
constant constexpr uint kSumNormThreads = 384;
constant constexpr uint kLaneSets = 64;
constant constexpr uint kBucketThreads = 1024;
constant constexpr uint kGateSimdgroups = 4;
constant constexpr uint kGateSingleExperts = 2;
constant constexpr uint kGateExperts = 4;
constant constexpr uint kGateTokens = 4;
constant constexpr uint kMaxSlots = 64;
constant constexpr uint kThreadgroupFloats = 8192;
constant constexpr uint kMatmulBound = 384;
constant constexpr uint kRowGroupsOfSimdgroup = 4;
constant constexpr uint kSingleRows = 4;
constant constexpr uint kFewRows = 4;
constant constexpr uint kFewDownRows = 8;
constant constexpr uint kRowsSimdgroups = 8;
constant constexpr uint kMaxFewPairs = 512;
constant constexpr uint kColumnSimdgroups = 16;
constant constexpr uint kTilePairs = 32;
constant constexpr uint kGemmRows = 128;
constant constexpr uint kGemmSimdgroups = 4;
constant constexpr uint kCombineColumns = 4;
struct NormParams {
  uint32_t rows;
  uint32_t width;
  uint32_t simdgroups_per_row;
  uint32_t vectorised;
  uint32_t weight_dtype;
  uint32_t scalar_kind;
  uint32_t scalar_dtype;
  uint32_t write_sum;
  float eps;
  float weight_offset;
};
struct SiluMulParams {
  uint64_t count;
  uint32_t vectorised;
};
struct WeightedSumParams {
  uint32_t rows;
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t weights_dtype;
  uint32_t has_shared;
  uint32_t has_gate;
  uint32_t gate_dtype;
  uint32_t gate_is_logit;
  uint32_t has_residual;
};
struct WeightedSumNormParams {
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t weights_dtype;
  uint32_t norm_dtype;
  float eps;
};
struct RouterParams {
  uint32_t rows;
  uint32_t experts;
  uint32_t top_k;
  uint32_t vectorised;
  uint32_t scoring;
  uint32_t has_bias;
  uint32_t bias_dtype;
  uint32_t bias_on_logits;
  uint32_t groups;
  uint32_t top_groups;
  uint32_t group_score_is_max;
  uint32_t has_masked_score;
  uint32_t normalise;
  uint32_t has_scale;
  uint32_t scale_dtype;
  uint32_t normalise_scaled;
  float masked_score;
  float norm_eps;
  float norm_min;
  float scaling_factor;
};
struct GateParams {
  uint32_t tokens;
  uint32_t experts;
  uint32_t width;
  uint32_t vectorised;
  uint32_t hidden_dtype;
  uint32_t norm_dtype;
  float eps;
};
struct BucketParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t chunks;
  uint32_t chunk;
  uint32_t upper_digits;
  uint32_t tile_pairs;
  uint32_t sentinel_tiles;
  uint32_t columns_a;
  uint32_t columns_b;
};
struct IdsTpeParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t gate_up_tiles;
  uint32_t down_tiles;
};
struct ExpertParams {
  uint32_t tokens;
  uint32_t slots;
  uint32_t pairs;
  uint32_t experts;
  uint32_t inputs;
  uint32_t rows;
  uint32_t outputs;
  uint32_t vectorised;
  uint32_t wide_ids;
  uint32_t x_per_pair;
  uint32_t units_are_experts;
  uint32_t writes_tiles;
  uint32_t row_layout;
  uint32_t activation;
  uint32_t bias_dtype;
  uint32_t has_bias;
  float alpha;
  float limit;
};
struct ExpertCombineParams {
  uint32_t weights_dtype;
  uint32_t gate_dtype;
  uint32_t has_gate;
  uint32_t gate_is_logit;
  uint32_t has_shared;
  uint32_t has_residual;
};
struct ExpertDownParams {
  ExpertParams matmul;
  ExpertCombineParams combine;
};
using namespace metal;
constant constexpr uint kMaxSimdgroups = 32;
template <typename T, int N>
struct Raw {
  T v[N];
};
template <typename T>
struct Raw<T, 4> {
  vec<T, 4> v;
};
template <int N>
struct Pack {
  float v[N];
};
template <int N, typename T>
inline Raw<T, N> load_raw(device const T* source) {
  Raw<T, N> raw;
  if constexpr (N == 4) {
    raw.v = *reinterpret_cast<device const vec<T, 4>*>(source);
  } else {
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) raw.v[i] = source[i];
  }
  return raw;
}
template <typename T, int N>
inline Pack<N> widen(Raw<T, N> raw) {
  Pack<N> pack;
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) pack.v[i] = float(raw.v[i]);
  return pack;
}
template <typename T, int N>
inline Raw<T, N> narrow(Pack<N> pack) {
  Raw<T, N> raw;
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) raw.v[i] = T(pack.v[i]);
  return raw;
}
template <int N, typename T>
inline Pack<N> load_pack(device const T* source) {
  return widen(load_raw<N>(source));
}
template <typename T, int N>
inline void store_raw(device T* target, Raw<T, N> raw) {
  if constexpr (N == 4) {
    *reinterpret_cast<device vec<T, 4>*>(target) = raw.v;
  } else {
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) target[i] = raw.v[i];
  }
}
template <int N, typename T>
inline void store_pack(device T* target, Pack<N> pack) {
  store_raw(target, narrow<T>(pack));
}
template <int N>
struct AnyRaw {
  Raw<float, N> wide;
  Raw<ushort, N> narrow;
};
template <int N>
inline AnyRaw<N> load_any_raw(device const uchar* source, uint dtype, ulong index) {
  AnyRaw<N> raw;
  if (dtype == 0) {
    raw.wide = load_raw<N>(reinterpret_cast<device const float*>(source) + index);
  } else {
    raw.narrow = load_raw<N>(reinterpret_cast<device const ushort*>(source) + index);
  }
  return raw;
}
template <int N>
inline Pack<N> widen(AnyRaw<N> raw, uint dtype) {
  if (dtype == 0) return widen(raw.wide);
  Pack<N> pack;
  if (dtype == 1) {
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) pack.v[i] = float(as_type<half>(ushort(raw.narrow.v[i])));
  } else {
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) pack.v[i] = as_type<float>(uint(raw.narrow.v[i]) << 16);
  }
  return pack;
}
template <int N>
inline Pack<N> load_any(device const uchar* source, uint dtype, ulong index) {
  return widen(load_any_raw<N>(source, dtype, index), dtype);
}
inline float load_one(device const uchar* source, uint dtype, ulong index) {
  if (dtype == 0) return reinterpret_cast<device const float*>(source)[index];
  const ushort bits = reinterpret_cast<device const ushort*>(source)[index];
  return dtype == 1 ? float(as_type<half>(bits)) : as_type<float>(uint(bits) << 16);
}
template <int N>
inline float sum_of_squares(Pack<N> pack) {
  float sum = 0.0f;
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) sum += pack.v[i] * pack.v[i];
  return sum;
}
inline float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}
inline uint ballot(bool predicate) {
  return static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(predicate)));
}
inline float threadgroup_sum(float value, threadgroup float* partials, uint lane, uint simdgroup,
                             uint simdgroups) {
  const float sum = simd_sum(value);
  if (lane == 0) partials[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? partials[lane] : 0.0f);
}
inline uint expert_of_words(uint low, uint high, constant ExpertParams& params) {
  return min(high == 0 ? low : params.experts, params.experts);
}
inline uint expert_of(device const int* ids, uint pair, constant ExpertParams& params) {
  if (params.wide_ids == 0) return expert_of_words(uint(ids[pair]), 0, params);
  return expert_of_words(uint(ids[2 * pair]), uint(ids[2 * pair + 1]), params);
}
inline uint input_row(uint pair, constant ExpertParams& params) {
  return params.x_per_pair != 0 ? pair : pair / params.slots;
}
inline uint outputs_of_rows(uint rows, constant ExpertParams& params) {
  return params.row_layout == 0 ? rows : rows / 2;
}
inline uint weight_row(uint output, uint half_of_pair, constant ExpertParams& params) {
  if (params.row_layout == 2) return 2 * output + half_of_pair;
  if (params.row_layout == 1) return output + half_of_pair * params.outputs;
  return output;
}
template <typename T>
inline uint dtype_of() {
  if (is_same_v<T, float>) return 0;
  return is_same_v<T, half> ? 1 : 2;
}
template <int kWords>
struct Words {
  uint v[kWords];
};
template <int kWords>
inline Words<kWords> load_words(device const uint* source) {
  Words<kWords> words;
  if constexpr (kWords % 4 == 0) {
#pragma clang loop unroll(full)
           for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = reinterpret_cast<device const uint4*>(source)[i];
#pragma clang loop unroll(full)
             for (int j = 0; j < 4; ++j) words.v[4 * i + j] = four[j];
    }
  } else if constexpr (kWords % 2 == 0) {
#pragma clang loop unroll(full)
           for (int i = 0; i < kWords / 2; ++i) {
      const uint2 two = reinterpret_cast<device const uint2*>(source)[i];
      words.v[2 * i] = two.x;
      words.v[2 * i + 1] = two.y;
    }
  } else {
#pragma clang loop unroll(full)
           for (int i = 0; i < kWords; ++i) words.v[i] = source[i];
  }
  return words;
}
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
#pragma clang loop unroll(full)
         for (int i = 0; i < N / kPerWord; ++i) {
    vec<T, 2> pair = vec<T, 2>(T(0.0f));
#pragma clang loop unroll(full)
           for (int j = 0; j < kPerWord; ++j) {
      if (uint(kPerWord * i + j) < left) pair[j] = source[kPerWord * i + j];
    }
    elements.words.v[i] = word_of(pair);
  }
  return elements;
}
struct InputSums {
  float v[2];
};
struct PairPlace {
  int pair, element;
};
template <typename T>
struct Dense {
  typedef T Element;
  static constant constexpr int kValues = 8, kTileValues = 32 / sizeof(T), kUnit = 8, kPairs = 2;
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
        constant ExpertParams& params)
      : matrix(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        inputs(params.inputs),
        vectorised(params.vectorised != 0) {}
  Row row(uint number) const { return number * inputs; }
  template <int N>
  Chunk<N> load(Row row, uint column, uint left) const {
    return {load_elements<N>(matrix + (row + column), left, vectorised)};
  }
  static Pack<8> codes(Chunk<kValues> chunk, int) {
    Pack<8> pack;
#pragma clang loop unroll(full)
           for (int i = 0; i < 8; ++i) pack.v[i] = chunk.elements.at(i);
    return pack;
  }
  static void add_inputs(Pack<8>, thread InputSums&) {}
  static float scaled(Chunk<kValues>, float dot, InputSums) { return dot; }
  static PairPlace pair_place(int value) { return {value / 2, value % 2}; }
  static float2 values(Chunk<kTileValues> chunk, int pair) {
    return float2(chunk.elements.at(2 * pair), chunk.elements.at(2 * pair + 1));
  }
};
template <typename T>
struct DenseColumns {
  typedef T Element;
  static constant constexpr int kTileValues = 32 / sizeof(T);
  template <int N>
  struct Chunk {
    T v[N];
  };
  typedef uint Row;
  device const T* matrix;
  uint rows;
  DenseColumns(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
               constant ExpertParams& params)
      : matrix(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        rows(params.rows) {}
  T element(uint row, uint column) const { return matrix[column * rows + row]; }
  Row row(uint number) const { return number; }
  template <int N>
  Chunk<N> load(Row row, uint column, uint left) const {
    Chunk<N> chunk;
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) chunk.v[i] = uint(i) < left ? element(row, column + i) : T(0.0f);
    return chunk;
  }
  static PairPlace pair_place(int value) { return {value / 2, value % 2}; }
  static float2 values(Chunk<kTileValues> chunk, int pair) {
    return float2(float(chunk.v[2 * pair]), float(chunk.v[2 * pair + 1]));
  }
};
template <typename Scale, int kBits, int kGroup>
struct PackedRows {
  struct Row {
    uint word, group;
  };
  device const uint* words;
  device const Scale* scales;
  uint words_per_row, groups_per_row;
  PackedRows(device const uchar* packed, device const uchar* scales_, uint expert,
             constant ExpertParams& params)
      : words_per_row(params.inputs / 16 * kBits / 2), groups_per_row(params.inputs / kGroup) {
    const ulong row = ulong(expert) * params.rows;
    words = reinterpret_cast<device const uint*>(packed) + row * words_per_row;
    scales = reinterpret_cast<device const Scale*>(scales_) + row * groups_per_row;
  }
  Row row(uint number) const { return {number * words_per_row, number * groups_per_row}; }
  static Row at(Row row, uint column) {
    return {row.word + column / 16 * kBits / 2, row.group + column / kGroup};
  }
};
template <int kBits, int kWords>
inline uint code_at(Words<kWords> words, int index) {
  const int bit = index * kBits, word = bit / 32, shift = bit % 32;
  uint code = words.v[word] >> shift;
  if (shift + kBits > 32) code |= words.v[word + 1] << (32 - shift);
  return code & ((1u << kBits) - 1);
}
template <int kBits>
struct HalfCodes {
  static constant constexpr bool kAligned = 16 % kBits == 0;
  static constant constexpr int kPairs = 16 / kBits;
  static constant constexpr int kShifts = kAligned && 2 * kBits <= 10 ? 2 : 1;
  static constant constexpr uint kMask = ((1u << kBits) - 1) * 0x00010001u;
  static int shift(int pair) { return kAligned ? pair % kPairs % kShifts : 0; }
  static float offset(int pair) { return shift(pair) == 0 ? 1024.0f : float(1024 >> kBits); }
  static PairPlace pair_place(int value) {
    if (!kAligned) return {value / 2, value % 2};
    const int in_word = value % (2 * kPairs);
    return {value / (2 * kPairs) * kPairs + in_word % kPairs, in_word / kPairs};
  }
  template <int kWords>
  static half2 pair(Words<kWords> words, int pair) {
    if constexpr (kAligned) {
      const int up = kBits * shift(pair);
      const uint word = words.v[pair / kPairs] >> (kBits * (pair % kPairs) - up);
      return as_type<half2>((word & (kMask << up)) | (0x64006400u - uint(up) * 0x04000400u));
    } else {
      const uint first = code_at<kBits>(words, 2 * pair), second = code_at<kBits>(words, 2 * pair + 1);
      return as_type<half2>(first | second << 16 | 0x64006400u);
    }
  }
};
template <int kCount, typename Codes>
inline Pack<kCount> in_order(thread const float2* pairs) {
  Pack<kCount> pack;
#pragma clang loop unroll(full)
         for (int i = 0; i < kCount; ++i) {
    const PairPlace place = Codes::pair_place(i);
    pack.v[i] = pairs[place.pair][place.element];
  }
  return pack;
}
template <typename T, int kBits, int kGroup>
struct Affine {
  typedef T Element;
  typedef HalfCodes<kBits> Codes;
  typedef PackedRows<T, kBits, kGroup> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = 32;
  static constant constexpr int kPairs = kBits % 4 == 0 ? 2 : 1;
  static constant constexpr int kTileValues = kBits % 2 == 0 ? 16 : 32;
  static constant constexpr int kUnit = kBits == 2 ? 16 : 8;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr bool kExact = sizeof(T) == 4;
  template <int N>
  struct Chunk {
    Words<N * kBits / 32> words;
    T scale, bias;
  };
  Rows rows;
  device const T* biases;
  Affine(device const uchar* packed, device const uchar* scales, device const uchar* biases_, uint expert,
         constant ExpertParams& params)
      : rows(packed, scales, expert, params) {
    biases = reinterpret_cast<device const T*>(biases_) + ulong(expert) * params.rows * rows.groups_per_row;
  }
  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Chunk<N> load(Row row, uint column, uint) const {
    const Row place = Rows::at(row, column);
    return {load_words<N * kBits / 32>(rows.words + place.word), rows.scales[place.group],
            biases[place.group]};
  }
  static float offset(int pair) { return kExact ? 0.0f : Codes::offset(pair); }
  template <int N>
  static float2 coded_pair(Chunk<N> chunk, int pair) {
    half2 codes = Codes::pair(chunk.words, pair);
    if (kExact) codes -= half2(half(Codes::offset(pair)));
    return float2(float(codes.x), float(codes.y));
  }
  static Pack<kUnit> codes(Chunk<kValues> chunk, int unit) {
    float2 pairs[kUnit / 2];
#pragma clang loop unroll(full)
           for (int i = 0; i < kUnit / 2; ++i) pairs[i] = coded_pair(chunk, unit * kUnit / 2 + i);
    return in_order<kUnit, Codes>(pairs);
  }
  static void add_inputs(Pack<kUnit> inputs, thread InputSums& sums) {
#pragma clang loop unroll(full)
           for (int i = 0; i < kUnit; ++i) sums.v[Codes::shift(Codes::pair_place(i).pair)] += inputs.v[i];
  }
  static float scaled(Chunk<kValues> chunk, float dot, InputSums sums) {
#pragma clang loop unroll(full)
           for (int i = 0; i < Codes::kShifts; ++i) dot = fma(-offset(i), sums.v[i], dot);
    const float sum = Codes::kShifts == 1 ? sums.v[0] : sums.v[0] + sums.v[1];
    return fma(float(chunk.bias), sum, float(chunk.scale) * dot);
  }
  static PairPlace pair_place(int value) { return Codes::pair_place(value); }
  static float2 values(Chunk<kTileValues> chunk, int pair) {
    const float scale = float(chunk.scale), rest = fma(-offset(pair), scale, float(chunk.bias));
    const float2 codes = coded_pair(chunk, pair);
    return float2(fma(codes.x, scale, rest), fma(codes.y, scale, rest));
  }
};
struct E2M1 {
  static constant constexpr int kBits = 4;
  static constant constexpr float kUnit = 16384.0f;
  static half2 pair(uint word, int i) {
    const uint signs = i < 3 ? word << (12 - 4 * i) : word;
    const uint magnitudes = i < 3 ? word << (9 - 4 * i) : word >> 3;
    return as_type<half2>((signs & 0x80008000u) | (magnitudes & 0x0e000e00u));
  }
};
struct E4M3 {
  static constant constexpr int kBits = 8;
  static constant constexpr float kUnit = 256.0f;
  static half2 pair(uint word, int i) {
    const uint signs = i == 0 ? word << 8 : word;
    const uint magnitudes = i == 0 ? word << 7 : word >> 1;
    return as_type<half2>((signs & 0x80008000u) | (magnitudes & 0x3f803f80u));
  }
};
struct ScaleE8M0 {
  static float of_codes(uchar scale) { return scale == 0 ? 0.5f : 1.0f; }
  static float factor(uchar scale) { return as_type<float>(max(uint(scale), 1u) << 23); }
};
struct ScaleE4M3 {
  static float of_codes(uchar) { return 1.0f; }
  static float factor(uchar scale) {
    const uint bits = uint(scale & 0x80) << 8 | uint(scale & 0x7f) << 7;
    return float(as_type<half>(ushort(bits)) * half(E4M3::kUnit));
  }
};
template <typename T, typename Code, typename CodeScale, int kGroup>
struct FloatCodes {
  typedef T Element;
  typedef PackedRows<uchar, Code::kBits, kGroup> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = kGroup, kTileValues = 16, kUnit = 8, kPairs = 2;
  static constant constexpr bool kAnyLength = false;
  static constant constexpr int kCodePairs = 16 / Code::kBits;
  template <int N>
  struct Chunk {
    Words<N * Code::kBits / 32> words;
    uchar scale;
  };
  Rows rows;
  FloatCodes(device const uchar* packed, device const uchar* scales, device const uchar*, uint expert,
             constant ExpertParams& params)
      : rows(packed, scales, expert, params) {}
  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Chunk<N> load(Row row, uint column, uint) const {
    const Row place = Rows::at(row, column);
    return {load_words<N * Code::kBits / 32>(rows.words + place.word), rows.scales[place.group]};
  }
  static PairPlace pair_place(int value) { return HalfCodes<Code::kBits>::pair_place(value); }
  template <int N>
  static half2 coded_pair(Chunk<N> chunk, int pair) {
    const half2 codes = Code::pair(chunk.words.v[pair / kCodePairs], pair % kCodePairs);
    return codes * half2(half(Code::kUnit * CodeScale::of_codes(chunk.scale)));
  }
  static Pack<kUnit> codes(Chunk<kValues> chunk, int unit) {
    float2 pairs[kUnit / 2];
#pragma clang loop unroll(full)
           for (int i = 0; i < kUnit / 2; ++i) {
      const half2 two = coded_pair(chunk, unit * kUnit / 2 + i);
      pairs[i] = float2(float(two.x), float(two.y));
    }
    return in_order<kUnit, HalfCodes<Code::kBits>>(pairs);
  }
  static void add_inputs(Pack<kUnit>, thread InputSums&) {}
  static float scaled(Chunk<kValues> chunk, float dot, InputSums) {
    return dot * CodeScale::factor(chunk.scale);
  }
  static float2 values(Chunk<kTileValues> chunk, int pair) {
    const half2 codes = coded_pair(chunk, pair);
    const float factor = CodeScale::factor(chunk.scale);
    return float2(float(codes.x) * factor, float(codes.y) * factor);
  }
};
template <typename T>
using Mxfp4 = FloatCodes<T, E2M1, ScaleE8M0, 32>;
template <typename T>
using Mxfp8 = FloatCodes<T, E4M3, ScaleE8M0, 32>;
template <typename T>
using Nvfp4 = FloatCodes<T, E2M1, ScaleE4M3, 16>;
constant constexpr uint kRowGroups = kRowGroupsOfSimdgroup;
constant constexpr uint kRowLanes = kSimdWidth / kRowGroups;
template <int R>
struct RowSet {
  uint v[R];
};
template <int M>
struct Sources {
  uint v[M];
};
template <int R, int M>
struct Dots {
  float v[R][M];
};
template <int R>
inline RowSet<R> rows_of_lane(uint first, uint lane, constant ExpertParams& params) {
  RowSet<R> rows;
#pragma clang loop unroll(full)
         for (int r = 0; r < R; ++r) {
    const uint local = lane / kRowLanes * R + r;
    const uint output = min(first + outputs_of_rows(local, params), params.outputs - 1);
    rows.v[r] = weight_row(output, local % 2, params);
  }
  return rows;
}
template <typename W, int R, int M, typename C>
inline void add_chunks(thread C* chunks, device const typename W::Element* x, Sources<M> sources, uint column,
                       uint left, thread Dots<R, M>& dots, constant ExpertParams& params) {
  constexpr int kUnit = W::kUnit;
  const bool vectorised = W::kAnyLength ? params.vectorised != 0 : true;
  Dots<R, M> coded;
  InputSums sums[M];
#pragma clang loop unroll(full)
         for (int m = 0; m < M; ++m) {
    sums[m].v[0] = sums[m].v[1] = 0.0f;
#pragma clang loop unroll(full)
           for (int r = 0; r < R; ++r) coded.v[r][m] = 0.0f;
  }
#pragma clang loop unroll(full)
         for (int unit = 0; unit < W::kValues / kUnit; ++unit) {
    Pack<kUnit> inputs[M];
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) {
      const auto loaded =
          load_elements<kUnit>(x + sources.v[m] + column + unit * kUnit, left - unit * kUnit, vectorised);
#pragma clang loop unroll(full)
             for (int i = 0; i < kUnit; ++i) inputs[m].v[i] = loaded.at(i);
      W::add_inputs(inputs[m], sums[m]);
    }
#pragma clang loop unroll(full)
           for (int r = 0; r < R; ++r) {
      const Pack<kUnit> codes = W::codes(chunks[r], unit);
#pragma clang loop unroll(full)
             for (int m = 0; m < M; ++m) {
#pragma clang loop unroll(full)
               for (int i = 0; i < kUnit; ++i) {
          coded.v[r][m] = fma(codes.v[i], inputs[m].v[i], coded.v[r][m]);
        }
      }
    }
  }
#pragma clang loop unroll(full)
         for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) {
      dots.v[r][m] += W::scaled(chunks[r], coded.v[r][m], sums[m]);
    }
  }
}
template <typename W, int R, int M>
inline Dots<R, M> row_dots(W weights, RowSet<R> rows, device const typename W::Element* x, Sources<M> sources,
                           uint lane, constant ExpertParams& params) {
  typedef typename W::template Chunk<W::kValues> Chunk;
  constexpr uint kStride = kRowLanes * W::kValues;
  const uint inputs = params.inputs;
  typename W::Row starts[R];
  Dots<R, M> dots;
#pragma clang loop unroll(full)
         for (int r = 0; r < R; ++r) {
    starts[r] = weights.row(rows.v[r]);
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) dots.v[r][m] = 0.0f;
  }
  for (uint column = lane % kRowLanes * W::kValues; column < inputs; column += kStride) {
    Chunk chunks[R];
#pragma clang loop unroll(full)
           for (int r = 0; r < R; ++r) {
      chunks[r] = weights.template load<W::kValues>(starts[r], column, inputs - column);
    }
    add_chunks<W, R, M>(chunks, x, sources, column, inputs - column, dots, params);
  }
#pragma clang loop unroll(full)
         for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) {
      float sum = dots.v[r][m];
#pragma clang loop unroll(full)
             for (ushort distance = 1; distance < kRowLanes; distance *= 2) {
        sum += simd_shuffle_xor(sum, distance);
      }
      dots.v[r][m] = sum;
    }
  }
  return dots;
}
template <int R, int M>
inline float picked(Dots<R, M> dots, uint row, uint pair) {
  float value = dots.v[0][0];
#pragma clang loop unroll(full)
         for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) value = row == uint(r) && pair == uint(m) ? dots.v[r][m] : value;
  }
  return value;
}
inline float erfc_positive(float z) {
  const float t = 1.0f / (1.0f + 0.3f * z);
  float p = -0.13065015f;
  p = fma(p, t, 0.49119918f);
  p = fma(p, t, -0.52430234f);
  p = fma(p, t, 0.56199099f);
  p = fma(p, t, -0.10493684f);
  p = fma(p, t, 0.2195282f);
  p = fma(p, t, 0.14709303f);
  p = fma(p, t, 0.17090168f);
  p = fma(p, t, 0.16917621f);
  return t * p * precise::exp(-z * z);
}
inline float gelu(float x) {
  const float tail = 0.5f * erfc_positive(0.70710678f * fabs(x));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}
inline float gelu_tanh(float x) {
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}
inline float pointwise_activation(float x, uint activation) {
  if (activation == 1) return x * sigmoid(x);
  if (activation == 2) return gelu(x);
  if (activation == 3) return gelu_tanh(x);
  const float positive = x < 0.0f ? 0.0f : x;
  if (activation == 4) return positive;
  if (activation == 5) return positive * positive;
  return x;
}
inline float at_most(float x, float limit) {
  return x > limit ? limit : x;
}
inline float at_least(float x, float limit) {
  return x < limit ? limit : x;
}
inline float gated_activation(float gate, float up, constant ExpertParams& params) {
  if (params.activation == 6 || params.activation == 7) {
    gate = at_most(gate, params.limit);
    up = at_least(at_most(up, params.limit), -params.limit);
    if (params.activation == 7) return gate * sigmoid(gate) * up;
    return (up + 1.0f) * (gate * sigmoid(params.alpha * gate));
  }
  return pointwise_activation(gate, params.activation) * up;
}
inline float with_bias(float value, device const uchar* bias, uint expert, uint row,
                       constant ExpertParams& params) {
  return params.has_bias != 0 ? value + load_one(bias, params.bias_dtype, ulong(expert) * params.rows + row)
                              : value;
}
inline float finished_output(float own, float up, device const uchar* bias, uint expert, uint output,
                             constant ExpertParams& params) {
  if (params.row_layout == 0) {
    return pointwise_activation(with_bias(own, bias, expert, output, params), params.activation);
  }
  return gated_activation(with_bias(own, bias, expert, weight_row(output, 0, params), params),
                          with_bias(up, bias, expert, weight_row(output, 1, params), params), params);
}
inline float combined(float sum, uint token, uint column, uint columns, device const uchar* shared_gate,
                      device const uchar* shared_out, device const uchar* residual, uint dtype,
                      constant ExpertCombineParams& params) {
  const ulong index = ulong(token) * columns + column;
  if (params.has_shared != 0) {
    float gate = 1.0f;
    if (params.has_gate != 0) gate = load_one(shared_gate, params.gate_dtype, token);
    if (params.has_gate != 0 && params.gate_is_logit != 0) gate = sigmoid(gate);
    sum += gate * load_one(shared_out, dtype, index);
  }
  if (params.has_residual != 0) sum += load_one(residual, dtype, index);
  return sum;
}
template <int M>
struct PairSet {
  uint v[M];
  uint at(uint index) const {
    uint pair = v[0];
#pragma clang loop unroll(full)
           for (int m = 1; m < M; ++m) pair = index == uint(m) ? v[m] : pair;
    return pair;
  }
};
struct PairList {
  uint expert;
  uint count;
  uint before;
  uint first;
  uint at(threadgroup const ushort* members, uint index) const { return count == 1 ? first : members[index]; }
  template <int M>
  PairSet<M> some(threadgroup const ushort* members, uint start) const {
    PairSet<M> set;
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) set.v[m] = at(members, min(start + m, count - 1));
    return set;
  }
};
inline PairList list_pairs(device const int* ids, uint expert, threadgroup ushort* members, uint lane,
                           uint simdgroup, constant ExpertParams& params) {
  PairList list = {expert, 0, 0, 0};
  for (uint base = 0; base < params.pairs; base += kSimdWidth) {
    const uint pair = base + lane;
    const bool exists = pair < params.pairs;
    const uint id = expert_of(ids, min(pair, params.pairs - 1), params);
    const uint hits = ballot(exists && id == expert);
    list.before += popcount(ballot(exists && id < expert));
    if (list.count == 0 && hits != 0) list.first = base + ctz(hits);
    if (simdgroup == 0 && (hits >> lane & 1) != 0) {
      members[list.count + popcount(hits & ((1u << lane) - 1))] = ushort(pair);
    }
    list.count += popcount(hits);
  }
  return list;
}
inline PairList pairs_of_unit(device const int* ids, uint unit, threadgroup ushort* members, uint lane,
                              uint simdgroup, constant ExpertParams& params) {
  const PairList none = {params.experts, 0, 0, 0};
  const bool units_are_experts = params.units_are_experts != 0;
  const bool sentinels = unit == (units_are_experts ? params.experts : params.pairs);
  uint expert = params.experts;
  if (!sentinels) expert = units_are_experts ? unit : expert_of(ids, unit, params);
  if (expert == params.experts && !sentinels) return none;
  const PairList list = list_pairs(ids, expert, members, lane, simdgroup, params);
  if (list.count == 0 || (!units_are_experts && !sentinels && list.first != unit)) return none;
  if (list.count > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  return list;
}
inline void write_tile(PairList list, threadgroup const ushort* members, device int* pair_order,
                       device int4* tiles, uint thread_index, uint threads) {
  for (uint i = thread_index; i < list.count; i += threads) {
    pair_order[list.before + i] = int(list.at(members, i));
    tiles[list.before + i] = int4(int(list.expert), int(list.before), i == 0 ? int(list.count) : 0, 0);
  }
}
template <int kRows>
struct PairTerms {
  threadgroup float* values;
  threadgroup float& at(uint pair, uint row) const { return values[pair * kRows + row]; }
  void clear(uint pair) const {
#pragma clang loop unroll(full)
                                       for (int r = 0; r < kRows; ++r) at(pair, r) = 0.0f; }
  float sum(uint first, uint slots, uint row) const {
    float sum = 0.0f;
    for (uint slot = 0; slot < slots; ++slot) sum += at(first + slot, row);
    return sum;
  }
};
template <typename T, int kRows>
inline void store_combined(PairTerms<kRows> terms, uint first_token, uint tokens, uint first_row,
                           device const uchar* shared_gate, device const uchar* shared_out,
                           device const uchar* residual, device T* out, uint thread_index, uint threads,
                           constant ExpertDownParams& params) {
  const uint slots = params.matmul.slots, columns = params.matmul.outputs;
  for (uint i = thread_index; i < tokens * kRows; i += threads) {
    const uint token = first_token + i / kRows, row = first_row + i % kRows;
    if (row >= columns) continue;
    const float sum = terms.sum(i / kRows * slots, slots, i % kRows);
    out[ulong(token) * columns + row] = T(
        combined(sum, token, row, columns, shared_gate, shared_out, residual, dtype_of<T>(), params.combine));
  }
}
template <typename W, int R, int M>
inline void terms_of_pairs(W weights, PairSet<M> pairs, PairSet<M> places, uint count, uint expert,
                           uint first, device const typename W::Element* x, device const uchar* routing,
                           device const uchar* bias, PairTerms<kRowGroups * R> terms, uint lane,
                           constant ExpertDownParams& params) {
  constant ExpertParams& matmul = params.matmul;
  Sources<M> sources;
#pragma clang loop unroll(full)
         for (int m = 0; m < M; ++m) sources.v[m] = pairs.v[m] * matmul.inputs;
  const RowSet<R> rows = rows_of_lane<R>(first, lane, matmul);
  const Dots<R, M> dots = row_dots<W, R, M>(weights, rows, x, sources, lane, matmul);
  for (uint item = lane % kRowLanes; item < R * M; item += kRowLanes) {
    const uint m = item / R, local = lane / kRowLanes * R + item % R;
    if (m >= count) continue;
    const uint row = min(first + local, matmul.outputs - 1);
    terms.at(places.at(m), local) = load_one(routing, params.combine.weights_dtype, pairs.at(m)) *
                                    with_bias(picked(dots, item % R, m), bias, expert, row, matmul);
  }
}
template <typename W, int R>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_down(
    device const typename W::Element *x [[buffer(0)]], device const uchar *packed [[buffer(1)]], device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]], device typename W::Element *out [[buffer(6)]], device const uchar *routing [[buffer(7)]], device const uchar *shared_gate [[buffer(8)]], device const uchar *shared_out [[buffer(9)]], device const uchar *residual [[buffer(10)]], constant ExpertDownParams &params [[buffer(11)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int kRows = kRowGroups * R;
  threadgroup float memory[kMaxSlots * kRows];
  constant ExpertParams& matmul = params.matmul;
  const PairTerms<kRows> terms = {memory};
  const uint token = group.y, first = group.x * kRows;
  for (uint slot = simdgroup; slot < matmul.slots; slot += simdgroups) {
    const PairSet<1> pairs = {{token * matmul.slots + slot}}, places = {{slot}};
    const uint expert = expert_of(ids, pairs.v[0], matmul);
    if (expert < matmul.experts) {
      const W weights(packed, scales, biases, expert, matmul);
      terms_of_pairs<W, R, 1>(weights, pairs, places, 1, expert, first, x, routing, bias, terms, lane,
                              params);
    } else if (lane == 0) {
      terms.clear(slot);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T>(terms, token, 1, first, shared_gate, shared_out, residual, out, thread_index,
                    simdgroups * kSimdWidth, params);
}
template <typename W, int R>
inline void terms_of_expert(W weights, device const int* pair_order, uint count, uint expert, uint first,
                            device const typename W::Element* x, device const uchar* routing,
                            device const uchar* bias, PairTerms<kRowGroups * R> terms, uint lane,
                            constant ExpertDownParams& params) {
  for (uint start = 0; start < count;) {
    const uint left = count - start;
    if (W::kPairs > 1 && left > 1) {
      PairSet<W::kPairs> pairs;
#pragma clang loop unroll(full)
             for (int m = 0; m < W::kPairs; ++m) pairs.v[m] = uint(pair_order[min(start + m, count - 1)]);
      terms_of_pairs<W, R, W::kPairs>(weights, pairs, pairs, left, expert, first, x, routing, bias, terms,
                                      lane, params);
      start += W::kPairs;
    } else {
      const PairSet<1> one = {{uint(pair_order[start])}};
      terms_of_pairs<W, R, 1>(weights, one, one, left, expert, first, x, routing, bias, terms, lane, params);
      start += 1;
    }
  }
}
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_down_few(
    device const typename W::Element *x [[buffer(0)]], device const uchar *packed [[buffer(1)]], device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]], device typename W::Element *out [[buffer(6)]], device const uchar *routing [[buffer(7)]], device const uchar *shared_gate [[buffer(8)]], device const uchar *shared_out [[buffer(9)]], device const uchar *residual [[buffer(10)]], constant ExpertDownParams &params [[buffer(11)]], device const int* pair_order [[buffer(12)]],
    device const int4* tiles [[buffer(13)]], threadgroup float* memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int R = kFewDownRows / kRowGroups;
  constant ExpertParams& matmul = params.matmul;
  const PairTerms<kFewDownRows> terms = {memory};
  const uint first = group * kFewDownRows;
  for (uint pair = thread_index; pair < matmul.pairs; pair += kRowsSimdgroups * kSimdWidth) {
    if (expert_of(ids, pair, matmul) == matmul.experts) terms.clear(pair);
  }
  uint turn = 0;
  for (uint base = 0; base < matmul.pairs; base += kSimdWidth) {
    const uint position = base + lane;
    int4 own = int4(0);
    if (position < matmul.pairs) own = tiles[position];
    const uint starts = ballot(own.z > 0 && own.x < int(matmul.experts));
    for (uint left = starts; left != 0; left &= left - 1, ++turn) {
      if (turn % kRowsSimdgroups != simdgroup) continue;
      const int4 tile = tiles[base + ctz(left)];
      const W weights(packed, scales, biases, uint(tile.x), matmul);
      terms_of_expert<W, R>(weights, pair_order + tile.y, uint(tile.z), uint(tile.x), first, x, routing, bias,
                            terms, lane, params);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T>(terms, 0, matmul.tokens, first, shared_gate, shared_out, residual, out, thread_index,
                    kRowsSimdgroups * kSimdWidth, params);
}
template <typename T>
struct FragmentOf {
  typedef float type;
};
template <>
struct FragmentOf<half> {
  typedef half type;
};
struct MatrixPlace {
  uint row;
  uint quarter;
  MatrixPlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};
template <typename W, int kPairTiles>
struct Tile {
  typedef typename W::Element T;
  typedef typename FragmentOf<T>::type F;
  typedef typename W::template Chunk<W::kTileValues> Chunk;
  static constant constexpr int kRowTiles = kGemmRows / (8 * kGemmSimdgroups);
  static constant constexpr int kPairs = 8 * kPairTiles;
  static constant constexpr int kDepth = 4 * W::kTileValues;
  static constant constexpr int kStride = kPairs + 4;
  static constant constexpr int kThreads = kGemmSimdgroups * kSimdWidth;
  struct Rows {
    typename W::Row starts[kRowTiles];
    Chunk chunks[kRowTiles];
    Rows(W weights, uint first, MatrixPlace place, constant ExpertParams& params) {
#pragma clang loop unroll(full)
             for (int r = 0; r < kRowTiles; ++r) {
        const bool plain = params.row_layout == 0;
        const uint output = min(first + 8 * (plain ? r : r / 2) + place.row, params.outputs - 1);
        starts[r] = weights.row(weight_row(output, r % 2, params));
      }
    }
    void load(W weights, uint column, uint inputs) {
#pragma clang loop unroll(full)
             for (int r = 0; r < kRowTiles; ++r) {
        Chunk chunk = {};
        if (column < inputs) {
          chunk = weights.template load<W::kTileValues>(starts[r], column, inputs - column);
        }
        chunks[r] = chunk;
      }
    }
  };
  struct Inputs {
    static constant constexpr int kOctets = kDepth / 8;
    static constant constexpr int kPairsApart = kThreads / kOctets;
    static constant constexpr int kShares = (kPairs + kPairsApart - 1) / kPairsApart;
    device const T* sources[kShares];
    uint first;
    uint pair;
    uint target;
    Inputs(device const T* x, device const int* order, uint count, uint thread_index,
           constant ExpertParams& params)
        : first(8 * (thread_index % kOctets)), pair(thread_index / kOctets) {
      target = (tile_row(first % W::kTileValues) + 2 * (first / W::kTileValues)) * kStride + pair;
#pragma clang loop unroll(full)
             for (int share = 0; share < kShares; ++share) {
        const uint row = input_row(uint(order[min(pair + share * kPairsApart, count - 1)]), params);
        sources[share] = x + ulong(row) * params.inputs;
      }
    }
    static uint tile_row(int value) {
      const PairPlace place = W::pair_place(value);
      return 8 * place.pair + place.element;
    }
    void stage(threadgroup F* tile, uint depth, constant ExpertParams& params) const {
      const uint column = depth + first;
#pragma clang loop unroll(full)
             for (int share = 0; share < kShares; ++share) {
        if ((share + 1) * kPairsApart > kPairs && pair + share * kPairsApart >= kPairs) continue;
        Elements<T, 8> octet = {};
        if (column < params.inputs) {
          octet = load_elements<8>(sources[share] + column, params.inputs - column, params.vectorised != 0);
        }
#pragma clang loop unroll(full)
               for (int i = 0; i < 8; ++i) {
          tile[target + tile_row(i) * kStride + share * kPairsApart] = F(octet.at(i));
        }
      }
    }
  };
  struct Sums {
    simdgroup_matrix<float, 8, 8> sums[kRowTiles][kPairTiles];
    Sums() {
#pragma clang loop unroll(full)
             for (int r = 0; r < kRowTiles; ++r) {
#pragma clang loop unroll(full)
               for (int p = 0; p < kPairTiles; ++p) {
          sums[r][p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
      }
    }
    void add(thread Rows& rows, threadgroup const F* own) {
#pragma clang loop unroll(full)
             for (int k = 0; k < kDepth / 8; ++k) {
        simdgroup_matrix<F, 8, 8> values[kRowTiles];
#pragma clang loop unroll(full)
               for (int r = 0; r < kRowTiles; ++r) {
          const float2 two = W::values(rows.chunks[r], k);
          values[r].thread_elements()[0] = F(two.x);
          values[r].thread_elements()[1] = F(two.y);
        }
#pragma clang loop unroll(full)
               for (int p = 0; p < kPairTiles; ++p) {
          simdgroup_matrix<F, 8, 8> inputs;
          const vec<F, 2> two = *reinterpret_cast<threadgroup const vec<F, 2>*>(own + 8 * (k * kStride + p));
          inputs.thread_elements()[0] = two.x;
          inputs.thread_elements()[1] = two.y;
#pragma clang loop unroll(full)
                 for (int r = 0; r < kRowTiles; ++r) {
            simdgroup_multiply_accumulate(sums[r][p], values[r], inputs, sums[r][p]);
          }
        }
      }
    }
    void store(threadgroup float* memory, device const int* order, uint count, device const uchar* bias,
               uint expert, uint first, MatrixPlace place, uint lane, device T* out,
               constant ExpertParams& params) const {
      constexpr uint kRows = 8 * kRowTiles;
      const uint outputs = outputs_of_rows(kRows, params);
#pragma clang loop unroll(full)
             for (int p = 0; p < kPairTiles; ++p) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
               for (int r = 0; r < kRowTiles; ++r) {
          simdgroup_matrix<float, 8, 8> own = sums[r][p];
#pragma clang loop unroll(full)
                 for (int j = 0; j < 2; ++j) {
            memory[(2 * place.quarter + j) * kRows + 8 * r + place.row] = own.thread_elements()[j];
          }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint item = lane; item < 8 * outputs; item += kSimdWidth) {
          const uint local = 8 * p + item / outputs, output = item % outputs;
          if (local >= count || first + output >= params.outputs) continue;
          const bool plain = params.row_layout == 0;
          threadgroup const float* sum =
              memory + item / outputs * kRows + (plain ? output : output / 8 * 16 + output % 8);
          out[ulong(order[local]) * params.outputs + first + output] =
              T(finished_output(sum[0], plain ? 0.0f : sum[8], bias, expert, first + output, params));
        }
      }
    }
  };
  static void run(W weights, device const T* x, device const int* order, uint count, device const uchar* bias,
                  uint expert, uint first, threadgroup F* tile, uint thread_index, uint lane, uint simdgroup,
                  device T* out, constant ExpertParams& params) {
    const MatrixPlace place(lane);
    Rows rows(weights, first, place, params);
    const Inputs inputs(x, order, count, thread_index, params);
    Sums sums;
    for (uint depth = 0; depth < params.inputs; depth += kDepth) {
      rows.load(weights, depth + place.quarter * W::kTileValues, params.inputs);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      inputs.stage(tile, depth, params);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sums.add(rows, tile + place.row * kStride + 2 * place.quarter);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* memory = reinterpret_cast<threadgroup float*>(tile) + simdgroup * 64 * kRowTiles;
    sums.store(memory, order, count, bias, expert, first, place, lane, out, params);
  }
};
template <typename W, int kPairTiles>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_gemm(
    device const typename W::Element *x [[buffer(0)]], device const uchar *packed [[buffer(1)]], device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]], device typename W::Element *out [[buffer(6)]], constant ExpertParams& params [[buffer(7)]], device const int* pair_order [[buffer(8)]],
    device const int4* tiles [[buffer(9)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Tile<W, kPairTiles> Largest;
  constexpr int kBytes = Largest::kDepth * Largest::kStride * sizeof(typename Largest::F);
  constexpr int kSumBytes = Largest::kThreads / kSimdWidth * 64 * Largest::kRowTiles * sizeof(float);
  threadgroup float4 memory[(kBytes > kSumBytes ? kBytes : kSumBytes) / sizeof(float4)];
  threadgroup typename Largest::F* input_tile = reinterpret_cast<threadgroup typename Largest::F*>(memory);
  const uint block = outputs_of_rows(kGemmRows, params);
  const uint first_of_group = group.x * block, first = first_of_group + simdgroup * block / kGemmSimdgroups;
  const int4 tile = tiles[group.y];
  const uint count = tile.z;
  device const int* order = pair_order + tile.y;
  if (count == 0) return;
  if (tile.x < 0) {
    const uint columns = min(block, params.outputs - first_of_group);
    for (uint i = thread_index; i < count * columns; i += Largest::kThreads) {
      out[ulong(order[i / columns]) * params.outputs + first_of_group + i % columns] = 0;
    }
    return;
  }
  const W weights(packed, scales, biases, uint(tile.x), params);
  if constexpr (1 <= kPairTiles) { if (1 == kPairTiles || count <= 8 * 1) { Tile<W, 1>::run(weights, x, order, count, bias, uint(tile.x), first, input_tile, thread_index, lane, simdgroup, out, params); return; } }
  if constexpr (2 <= kPairTiles) { if (2 == kPairTiles || count <= 8 * 2) { Tile<W, 2>::run(weights, x, order, count, bias, uint(tile.x), first, input_tile, thread_index, lane, simdgroup, out, params); return; } }
  if constexpr (3 <= kPairTiles) { if (3 == kPairTiles || count <= 8 * 3) { Tile<W, 3>::run(weights, x, order, count, bias, uint(tile.x), first, input_tile, thread_index, lane, simdgroup, out, params); return; } }
  if constexpr (4 <= kPairTiles) { if (4 == kPairTiles || count <= 8 * 4) { Tile<W, 4>::run(weights, x, order, count, bias, uint(tile.x), first, input_tile, thread_index, lane, simdgroup, out, params); return; } }
}
template <typename T, int R, int M>
inline void store_outputs(Dots<R, M> dots, PairSet<M> pairs, uint count, device const uchar* bias,
                          uint expert, uint first, uint lane, device T* out, constant ExpertParams& params) {
  const uint outputs = outputs_of_rows(R, params), rows_of_output = R / outputs;
  for (uint item = lane % kRowLanes; item < outputs * M; item += kRowLanes) {
    const uint m = item / outputs, local = item % outputs;
    const uint output = first + lane / kRowLanes * outputs + local;
    if (m >= count || output >= params.outputs) continue;
    const float own = picked(dots, rows_of_output * local, m);
    const float up = rows_of_output == 2 ? picked(dots, 2 * local + 1, m) : 0.0f;
    out[ulong(pairs.at(m)) * params.outputs + output] =
        T(finished_output(own, up, bias, expert, output, params));
  }
}
template <typename W, int R, int M>
inline void rows_of_pairs(W weights, RowSet<R> rows, PairSet<M> pairs, uint count,
                          device const typename W::Element* x, device const uchar* bias, uint expert,
                          uint first, uint lane, device typename W::Element* out,
                          constant ExpertParams& params) {
  Sources<M> sources;
#pragma clang loop unroll(full)
         for (int m = 0; m < M; ++m) sources.v[m] = input_row(pairs.v[m], params) * params.inputs;
  const Dots<R, M> dots = row_dots<W, R, M>(weights, rows, x, sources, lane, params);
  store_outputs(dots, pairs, count, bias, expert, first, lane, out, params);
}
template <typename W, int R>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_rows(
    device const typename W::Element *x [[buffer(0)]], device const uchar *packed [[buffer(1)]], device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]], device typename W::Element *out [[buffer(6)]], constant ExpertParams& params [[buffer(7)]], uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  const uint pair = group.y;
  const uint count = outputs_of_rows(kRowGroups * R, params);
  const uint first = (group.x * kRowsSimdgroups + simdgroup) * count;
  if (first >= params.outputs) return;
  const uint expert = expert_of(ids, pair, params);
  if (expert == params.experts) {
    if (lane < min(count, params.outputs - first)) out[ulong(pair) * params.outputs + first + lane] = T(0.0f);
    return;
  }
  const W weights(packed, scales, biases, expert, params);
  const PairSet<1> pairs = {{pair}};
  rows_of_pairs<W, R, 1>(weights, rows_of_lane<R>(first, lane, params), pairs, 1, x, bias, expert, first,
                         lane, out, params);
}
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_rows_few(
    device const typename W::Element *x [[buffer(0)]], device const uchar *packed [[buffer(1)]], device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], device const int *ids [[buffer(4)]], device const uchar *bias [[buffer(5)]], device typename W::Element *out [[buffer(6)]], constant ExpertParams& params [[buffer(7)]], device int* pair_order [[buffer(8)]],
    device int4* tiles [[buffer(9)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int R = kFewRows;
  constexpr uint kThreads = kRowsSimdgroups * kSimdWidth;
  threadgroup ushort members[kMaxFewPairs];
  const uint count = outputs_of_rows(kRowGroups * R, params);
  const uint first_of_group = group.x * kRowsSimdgroups * count;
  const uint first = first_of_group + simdgroup * count;
  const PairList list = pairs_of_unit(ids, group.y, members, lane, simdgroup, params);
  if (list.count == 0) return;
  if (group.x == 0 && params.writes_tiles != 0) {
    write_tile(list, members, pair_order, tiles, thread_index, kThreads);
  }
  if (list.expert == params.experts) {
    const uint columns = min(params.outputs - first_of_group, kRowsSimdgroups * count);
    for (uint i = thread_index; i < list.count * columns; i += kThreads) {
      out[ulong(list.at(members, i / columns)) * params.outputs + first_of_group + i % columns] = T(0.0f);
    }
    return;
  }
  if (first >= params.outputs) return;
  const W weights(packed, scales, biases, list.expert, params);
  const RowSet<R> rows = rows_of_lane<R>(first, lane, params);
  for (uint start = 0; start < list.count;) {
    const uint left = list.count - start;
    if (W::kPairs > 1 && left > 1) {
      rows_of_pairs<W, R, W::kPairs>(weights, rows, list.template some<W::kPairs>(members, start), left, x,
                                     bias, list.expert, first, lane, out, params);
      start += W::kPairs;
    } else {
      rows_of_pairs<W, R, 1>(weights, rows, list.template some<1>(members, start), left, x, bias, list.expert,
                             first, lane, out, params);
      start += 1;
    }
  }
}
typedef Mxfp4<float> Weights; template[[host_name("expert_rows" "_mxfp4_f32")]] [[kernel]] decltype(expert_rows<Weights, kSingleRows>) expert_rows<Weights, kSingleRows>; template[[host_name("expert_rows_few" "_mxfp4_f32")]] [[kernel]] decltype(expert_rows_few<Weights>) expert_rows_few<Weights>; template[[host_name("expert_down" "_mxfp4_f32")]] [[kernel]] decltype(expert_down<Weights, kSingleRows>) expert_down<Weights, kSingleRows>; template[[host_name("expert_down_few" "_mxfp4_f32")]] [[kernel]] decltype(expert_down_few<Weights>) expert_down_few<Weights>; template[[host_name("expert_gemm8" "_mxfp4_f32")]] [[kernel]] decltype(expert_gemm<Weights, 1>) expert_gemm<Weights, 1>; template[[host_name("expert_gemm32" "_mxfp4_f32")]] [[kernel]] decltype(expert_gemm<Weights, kTilePairs / 8>) expert_gemm<Weights, kTilePairs / 8>;
