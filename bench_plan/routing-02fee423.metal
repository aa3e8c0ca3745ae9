
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
template <int R, int M>
struct GateSums {
  float logits[R][M];
  float squares[M];
};
template <typename W, int R, int M, int N>
inline GateSums<R, M> gate_sums(device const uchar* hidden, device const W* router,
                                device const uchar* norm_weight, uint first_expert, uint first_token,
                                uint lane, constant GateParams& params) {
  const uint width = params.width;
  GateSums<R, M> sums = {};
  for (uint column = lane * N; column < width; column += kSimdWidth * N) {
    Raw<W, N> rows[R];
#pragma clang loop unroll(full)
           for (int r = 0; r < R; ++r) {
      const uint expert = min(first_expert + r, params.experts - 1);
      rows[r] = load_raw<N>(router + ulong(expert) * width + column);
    }
    const Pack<N> norm = load_any<N>(norm_weight, params.norm_dtype, column);
#pragma clang loop unroll(full)
           for (int m = 0; m < M; ++m) {
      const uint token = min(first_token + m, params.tokens - 1);
      Pack<N> x = load_any<N>(hidden, params.hidden_dtype, ulong(token) * width + column);
      sums.squares[m] += sum_of_squares(x);
#pragma clang loop unroll(full)
             for (int i = 0; i < N; ++i) x.v[i] *= norm.v[i];
#pragma clang loop unroll(full)
             for (int r = 0; r < R; ++r) {
        const Pack<N> row = widen(rows[r]);
#pragma clang loop unroll(full)
               for (int i = 0; i < N; ++i) sums.logits[r][m] = fma(row.v[i], x.v[i], sums.logits[r][m]);
      }
    }
  }
  return sums;
}
template <typename W, int R, int M>
[[kernel]] void gate_logits(device const uchar* hidden [[buffer(0)]], device const W* router [[buffer(1)]],
                            device const uchar* norm_weight [[buffer(2)]], device float* logits [[buffer(3)]],
                            constant GateParams& params [[buffer(4)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint first_expert = (group.x * kGateSimdgroups + simdgroup) * R, first_token = group.y * M;
  if (first_expert >= params.experts) return;
  GateSums<R, M> sums;
  if (params.vectorised != 0) {
    sums = gate_sums<W, R, M, 4>(hidden, router, norm_weight, first_expert, first_token, lane, params);
  } else {
    sums = gate_sums<W, R, M, 1>(hidden, router, norm_weight, first_expert, first_token, lane, params);
  }
#pragma clang loop unroll(full)
         for (int m = 0; m < M; ++m) {
    const float mean = simd_sum(sums.squares[m]) / float(params.width);
    const float inverse = precise::rsqrt(mean + params.eps);
#pragma clang loop unroll(full)
           for (int r = 0; r < R; ++r) {
      const float logit = simd_sum(sums.logits[r][m]) * inverse;
      const uint expert = first_expert + r, token = first_token + m;
      if (lane == 0 && expert < params.experts && token < params.tokens) {
        logits[ulong(token) * params.experts + expert] = logit;
      }
    }
  }
}
template <int N>
struct Keys {
  uint v[N];
};
template <int N>
struct Values {
  float v[N];
};
constant constexpr uint kLowestKey = 0x00400000u;
inline float finite(float x) {
  return isnan(x) ? -FLT_MAX : clamp(x, -FLT_MAX, FLT_MAX);
}
inline uint ordered_key(float x) {
  const uint bits = as_type<uint>(x == 0.0f ? 0.0f : x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
inline bool is_chosen(uint key) {
  return key > 0 && key < kLowestKey;
}
template <int N>
inline void choose(thread Keys<N>& keys, uint count, uint lane) {
  uint best = 0;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) best = max(best, keys.v[j]);
  for (uint slot = 0; slot < count; ++slot) {
    const uint highest = simd_max(best);
    bool marks = lane == ctz(ballot(best == highest));
    best = 0;
#pragma clang loop unroll(full)
           for (int j = 0; j < N; ++j) {
      const bool is_it = marks && keys.v[j] == highest;
      keys.v[j] = is_it ? slot + 1 : keys.v[j];
      marks = marks && !is_it;
      best = keys.v[j] >= kLowestKey ? max(best, keys.v[j]) : best;
    }
  }
}
template <int N>
inline float sum_of(thread Values<N>& scores) {
  float sum = 0.0f;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) sum += scores.v[j];
  return simd_sum(sum);
}
template <int N>
inline void softmax_of_chosen(Keys<N> keys, thread Values<N>& values) {
  float highest = -FLT_MAX;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) highest = is_chosen(keys.v[j]) ? max(highest, values.v[j]) : highest;
  highest = simd_max(highest);
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    values.v[j] = is_chosen(keys.v[j]) ? precise::exp(values.v[j] - highest) : 0.0f;
  }
  const float sum = sum_of(values);
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) values.v[j] /= sum;
}
template <int N>
inline void normalise(thread Values<N>& scores, float eps, float minimum) {
  const float sum = sum_of(scores) + eps;
  const float bounded = sum < minimum ? minimum : sum;
  const float denominator = bounded == 0.0f ? 1.0f : bounded;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) scores.v[j] /= denominator;
}
template <int N>
inline void scale_chosen(Keys<N> keys, thread Values<N>& scores, device const uchar* scale, uint dtype,
                         uint lane) {
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    if (is_chosen(keys.v[j])) scores.v[j] *= load_one(scale, dtype, lane * N + j);
  }
}
template <int N>
inline void store_chosen(Keys<N> keys, Values<N> scores, uint lane, device float* weights, device int* ids) {
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    if (is_chosen(keys.v[j])) {
      weights[keys.v[j] - 1] = scores.v[j];
      ids[keys.v[j] - 1] = int(lane * N + j);
    }
  }
}
inline float softplus(float x) {
  const float y = precise::exp(-fabs(x));
  const float u = 1.0f + y;
  const float log1p = u == 1.0f ? y : precise::log(u) * y / (u - 1.0f);
  return max(x, 0.0f) + log1p;
}
struct Scoring {
  uint kind;
  float highest, sum;
  float of(float logit) const {
    if (kind == 0) return precise::exp(logit - highest) / sum;
    if (kind == 1) return sigmoid(logit);
    if (kind == 2) return precise::sqrt(softplus(logit));
    return logit;
  }
};
template <int N>
inline Scoring scoring_of(Values<N> logits, uint kind, int valid) {
  Scoring scoring = {kind, 0.0f, 1.0f};
  if (kind != 0) return scoring;
  scoring.highest = -FLT_MAX;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    scoring.highest = j < valid ? max(scoring.highest, logits.v[j]) : scoring.highest;
  }
  scoring.highest = simd_max(scoring.highest);
  scoring.sum = 0.0f;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    scoring.sum += j < valid ? precise::exp(logits.v[j] - scoring.highest) : 0.0f;
  }
  scoring.sum = simd_sum(scoring.sum);
  return scoring;
}
inline float2 simd_top2(float2 top) {
  for (ushort distance = kSimdWidth / 2; distance > 0; distance /= 2) {
    const float2 other = float2(simd_shuffle_xor(top.x, distance), simd_shuffle_xor(top.y, distance));
    top = float2(max(top.x, other.x), max(min(top.x, other.x), max(top.y, other.y)));
  }
  return top;
}
template <int N>
inline uint experts_of_best_groups(Values<N> values, RouterParams params, uint lane) {
  const uint group_size = params.experts / params.groups;
  const bool is_max = params.group_score_is_max != 0;
  Keys<N> groups;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) groups.v[j] = 0;
  for (uint group = 0; group < params.groups; ++group) {
    const uint first = lane * N - group * group_size;
    float2 top = float2(-INFINITY, -INFINITY);
#pragma clang loop unroll(full)
           for (int j = 0; j < N; ++j) {
      if (first + j < group_size) {
        top = float2(max(top.x, values.v[j]), max(min(top.x, values.v[j]), top.y));
      }
    }
    top = simd_top2(top);
    const uint key = ordered_key(is_max ? top.x : finite(top.x + top.y));
#pragma clang loop unroll(full)
           for (int j = 0; j < N; ++j) {
      if (group - lane * N == uint(j)) groups.v[j] = key;
    }
  }
  choose<N>(groups, params.top_groups, lane);
  uint chosen_groups = 0;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) chosen_groups |= is_chosen(groups.v[j]) ? 1u << j : 0u;
  uint members = 0;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    const uint group = min((lane * N + j) / group_size, params.groups - 1);
    const uint holder = simd_shuffle(chosen_groups, ushort(group / N));
    members |= ((holder >> (group % N)) & 1) << j;
  }
  return members;
}
template <int N>
inline Keys<N> keys_of(Values<N> logits, Scoring scoring, device const uchar* bias, int valid,
                       RouterParams params, uint lane) {
  const bool by_logits = params.bias_on_logits != 0 || params.scoring == 3;
  Values<N> choice;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    choice.v[j] = by_logits ? logits.v[j] : scoring.of(logits.v[j]);
    if (params.has_bias != 0 && j < valid)
      choice.v[j] = finite(choice.v[j] + load_one(bias, params.bias_dtype, lane * N + j));
  }
  uint members = ~0u;
  const bool compare_logits = params.has_bias == 0 && params.has_masked_score == 0;
  if (params.top_groups < params.groups) {
    members = compare_logits && params.group_score_is_max != 0
                  ? experts_of_best_groups<N>(logits, params, lane)
                  : experts_of_best_groups<N>(choice, params, lane);
  }
  const float outside = params.has_masked_score != 0 ? params.masked_score : -INFINITY;
  Keys<N> keys;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    const float compared = compare_logits ? logits.v[j] : choice.v[j];
    const float value = ((members >> j) & 1) != 0 ? compared : outside;
    keys.v[j] = j < valid ? ordered_key(value) : 0;
  }
  return keys;
}
template <int N, typename T>
inline Values<N> load_logits(device const T* source, RouterParams params, uint lane) {
  Values<N> logits;
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) logits.v[j] = 0.0f;
  if (N % 4 == 0 && params.vectorised != 0) {
    Raw<T, 4> raw[(N + 3) / 4];
#pragma clang loop unroll(full)
           for (int j = 0; j + 3 < N; j += 4) {
      if (lane * N + j < params.experts) raw[j / 4] = load_raw<4>(source + lane * N + j);
    }
#pragma clang loop unroll(full)
           for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) logits.v[j] = finite(float(raw[j / 4].v[j % 4]));
    }
  } else {
    T raw[N];
#pragma clang loop unroll(full)
           for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) raw[j] = source[lane * N + j];
    }
#pragma clang loop unroll(full)
           for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) logits.v[j] = finite(float(raw[j]));
    }
  }
  return logits;
}
template <typename T, int N>
[[kernel]] void route_rows(device const T* logits [[buffer(0)]], device const uchar* bias [[buffer(1)]],
                           device const uchar* per_expert_scale [[buffer(2)]],
                           device float* weights [[buffer(3)]], device int* ids [[buffer(4)]],
                           constant RouterParams& arguments [[buffer(5)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  const RouterParams params = arguments;
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  Values<N> values = load_logits<N>(logits + row * params.experts, params, lane);
  const int valid = int(min(params.experts > lane * N ? params.experts - lane * N : 0u, uint(N)));
  const Scoring scoring = scoring_of<N>(values, params.scoring, valid);
  Keys<N> keys = keys_of<N>(values, scoring, bias, valid, params, lane);
  choose<N>(keys, params.top_k, lane);
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) {
    values.v[j] = is_chosen(keys.v[j]) ? scoring.of(values.v[j]) : 0.0f;
  }
  if (params.scoring == 3) softmax_of_chosen<N>(keys, values);
  if (params.normalise != 0) normalise<N>(values, params.norm_eps, params.norm_min);
#pragma clang loop unroll(full)
         for (int j = 0; j < N; ++j) values.v[j] *= params.scaling_factor;
  if (params.has_scale != 0) scale_chosen<N>(keys, values, per_expert_scale, params.scale_dtype, lane);
  if (params.normalise_scaled != 0) normalise<N>(values, 0.0f, -INFINITY);
  store_chosen<N>(keys, values, lane, weights + row * params.top_k, ids + row * params.top_k);
}
template[[host_name("route2" "_f32")]] [[kernel]] decltype(route_rows<float, 2>) route_rows<float, 2>;
template[[host_name("route4" "_f32")]] [[kernel]] decltype(route_rows<float, 4>) route_rows<float, 4>;
template[[host_name("route8" "_f32")]] [[kernel]] decltype(route_rows<float, 8>) route_rows<float, 8>;
template[[host_name("route16" "_f32")]] [[kernel]] decltype(route_rows<float, 16>) route_rows<float, 16>;
template[[host_name("route32" "_f32")]] [[kernel]] decltype(route_rows<float, 32>) route_rows<float, 32>;
template[[host_name("gate_single" "_f32")]] [[kernel]] decltype(gate_logits<float, kGateSingleExperts, 1>) gate_logits<float, kGateSingleExperts, 1>;
template[[host_name("gate_many" "_f32")]] [[kernel]] decltype(gate_logits<float, kGateExperts, kGateTokens>) gate_logits<float, kGateExperts, kGateTokens>;
