
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
constant constexpr int kNormElements = 16;
struct RowThreads {
  uint index;
  uint count;
  uint lane;
  uint simdgroup;
  uint simdgroups;
};
inline float row_sum(float value, RowThreads threads, threadgroup float* partials) {
  if (threads.simdgroups == 1) return simd_sum(value);
  return threadgroup_sum(value, partials, threads.lane, threads.simdgroup, threads.simdgroups);
}
template <int N>
inline Pack<N> output_scale(device const uchar* scalar, constant NormParams& params, uint column) {
  if (params.scalar_kind == 2) return load_any<N>(scalar, params.scalar_dtype, column);
  const float value = params.scalar_kind == 1 ? load_one(scalar, params.scalar_dtype, 0) : 1.0f;
  Pack<N> scale;
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) scale.v[i] = value;
  return scale;
}
template <typename T, int N, bool kNormSum>
inline Raw<T, N> normed_columns(Raw<T, N> residual, Raw<T, N> input) {
  if constexpr (!kNormSum) return input;
  Pack<N> sum = widen(input);
  const Pack<N> base = widen(residual);
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) sum.v[i] += base.v[i];
  return narrow<T>(sum);
}
template <int N, bool kNormSum>
inline Pack<N> finished_columns(Pack<N> residual, Pack<N> x, float inverse, Pack<N> weight,
                                device const uchar* scalar, constant NormParams& params, uint column) {
  const Pack<N> scale = output_scale<N>(scalar, params, column);
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) {
    float y = x.v[i] * inverse * (weight.v[i] + params.weight_offset);
    if constexpr (!kNormSum) y += residual.v[i];
    x.v[i] = y * scale.v[i];
  }
  return x;
}
template <typename T, int N, bool kNormSum>
inline void norm_row(device const T* residual, device const T* input, device const uchar* weight,
                     device const uchar* scalar, device T* output, device T* sum_output,
                     constant NormParams& params, RowThreads threads, threadgroup float* partials) {
  constexpr int kKept = kNormElements / N;
  const uint step = threads.count * N;
  const uint first = threads.index * N;
  Raw<T, N> base[kKept];
  Raw<T, N> row[kKept];
  AnyRaw<N> first_weight;
  float sum = 0.0f;
#pragma clang loop unroll(full)
         for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) {
      base[k] = load_raw<N>(residual + column);
      row[k] = load_raw<N>(input + column);
    }
  }
  if (first < params.width) first_weight = load_any_raw<N>(weight, params.weight_dtype, first);
#pragma clang loop unroll(full)
         for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) {
      row[k] = normed_columns<T, N, kNormSum>(base[k], row[k]);
      if (kNormSum && params.write_sum != 0) store_raw(sum_output + column, row[k]);
      sum += sum_of_squares(widen(row[k]));
    }
  }
  const uint rest = first + kKept * step;
  for (uint column = rest; column < params.width; column += step) {
    const Raw<T, N> x =
        normed_columns<T, N, kNormSum>(load_raw<N>(residual + column), load_raw<N>(input + column));
    if (kNormSum && params.write_sum != 0) store_raw(sum_output + column, x);
    sum += sum_of_squares(widen(x));
  }
  const float total = row_sum(sum, threads, partials);
  const float inverse = precise::rsqrt(total / float(params.width) + params.eps);
#pragma clang loop unroll(full)
         for (int k = 0; k < kKept; ++k) {
    const uint column = first + k * step;
    if (column < params.width) {
      const Pack<N> factor = k == 0 ? widen(first_weight, params.weight_dtype)
                                    : load_any<N>(weight, params.weight_dtype, column);
      store_pack(output + column, finished_columns<N, kNormSum>(widen(base[k]), widen(row[k]), inverse,
                                                                factor, scalar, params, column));
    }
  }
  for (uint column = rest; column < params.width; column += step) {
    const Raw<T, N> r = load_raw<N>(residual + column);
    const Raw<T, N> x = normed_columns<T, N, kNormSum>(r, load_raw<N>(input + column));
    const Pack<N> factor = load_any<N>(weight, params.weight_dtype, column);
    store_pack(output + column,
               finished_columns<N, kNormSum>(widen(r), widen(x), inverse, factor, scalar, params, column));
  }
}
template <typename T, bool kNormSum>
[[kernel, max_total_threads_per_threadgroup(kNormThreads)]] void norm_rows(
    device const T* residual [[buffer(0)]], device const T* input [[buffer(1)]],
    device const uchar* weight [[buffer(2)]], device const uchar* scalar [[buffer(3)]],
    device T* output [[buffer(4)]], device T* sum_output [[buffer(5)]],
    constant NormParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partials[kMaxSimdgroups];
  const bool row_per_simdgroup = params.simdgroups_per_row == 1;
  const uint row = row_per_simdgroup ? group * simdgroups + simdgroup : group;
  if (row >= params.rows) return;
  const RowThreads threads = {row_per_simdgroup ? lane : thread_index, params.simdgroups_per_row * kSimdWidth,
                              lane, simdgroup, params.simdgroups_per_row};
  const ulong start = ulong(row) * params.width;
  if (params.vectorised != 0) {
    norm_row<T, 4, kNormSum>(residual + start, input + start, weight, scalar, output + start,
                             sum_output + start, params, threads, partials);
  } else {
    norm_row<T, 1, kNormSum>(residual + start, input + start, weight, scalar, output + start,
                             sum_output + start, params, threads, partials);
  }
}
template[[host_name("norm_add" "_bf16")]] [[kernel]] decltype(norm_rows<bfloat, false>) norm_rows<bfloat, false>;
template[[host_name("residual_norm" "_bf16")]] [[kernel]] decltype(norm_rows<bfloat, true>) norm_rows<bfloat, true>;
