
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
inline float silu_mul(float gate, float up) {
  return gate / (1.0f + precise::exp(-gate)) * up;
}
template <typename T>
[[kernel]] void silu_mul_stacked(device const T* gate [[buffer(0)]], device const T* up [[buffer(1)]],
                                 device T* output [[buffer(2)]],
                                 constant SiluMulParams& arguments [[buffer(3)]],
                                 uint group [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]]) {
  const SiluMulParams params = arguments;
  const uint width = params.vectorised != 0 ? 4 : 1;
  const ulong first = (ulong(group) * kSiluThreads + thread_index) * width;
  if (width == 4 && first + 4 <= params.count) {
    const Raw<T, 4> raw_gate = load_raw<4>(gate + first);
    const Raw<T, 4> raw_up = load_raw<4>(up + first);
    const Pack<4> g = widen(raw_gate);
    const Pack<4> u = widen(raw_up);
    Pack<4> out;
#pragma clang loop unroll(full)
           for (int i = 0; i < 4; ++i) out.v[i] = silu_mul(g.v[i], u.v[i]);
    store_pack(output + first, out);
    return;
  }
  for (ulong i = first; i < first + width && i < params.count; ++i)
    output[i] = T(silu_mul(float(gate[i]), float(up[i])));
}
constant constexpr uint kSlotBlock = 4;
template <typename T, int N>
inline Pack<N> sum_over_slots(device const T* slots, device const uchar* weights, uint weights_dtype,
                              ulong row, uint count, uint width, uint column, bool active, uint lane) {
  Pack<N> sum;
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) sum.v[i] = 0.0f;
  for (uint base = 0; base < count; base += kSimdWidth) {
    const bool has_weight = base + lane < count;
    const float lane_weight = has_weight ? load_one(weights, weights_dtype, row * count + base + lane) : 0.0f;
    const uint slots_here = min(count - base, kSimdWidth);
    for (uint block = 0; block < slots_here; block += kSlotBlock) {
      device const T* source = slots + (row * count + base + block) * width + column;
      Raw<T, N> loaded[kSlotBlock];
#pragma clang loop unroll(full)
             for (uint s = 0; s < kSlotBlock; ++s) {
        if (active && block + s < slots_here) loaded[s] = load_raw<N>(source + ulong(s) * width);
      }
#pragma clang loop unroll(full)
             for (uint s = 0; s < kSlotBlock; ++s) {
        const float weight = simd_shuffle(lane_weight, ushort(block + s));
        if (active && block + s < slots_here) {
          const Pack<N> x = widen(loaded[s]);
#pragma clang loop unroll(full)
                 for (int i = 0; i < N; ++i) sum.v[i] += weight * x.v[i];
        }
      }
    }
  }
  return sum;
}
template <typename T, int N>
inline void weighted_sum_columns(device const T* slots, device const uchar* weights,
                                 device const uchar* shared_gate, device const T* shared,
                                 device const T* residual, device T* output, WeightedSumParams params,
                                 ulong row, uint column, uint lane) {
  const bool active = column < params.width;
  const ulong place = row * params.width + column;
  Raw<T, N> raw_shared;
  Raw<T, N> raw_residual;
  if (active && params.has_shared != 0) raw_shared = load_raw<N>(shared + place);
  if (active && params.has_residual != 0) raw_residual = load_raw<N>(residual + place);
  Pack<N> sum = sum_over_slots<T, N>(slots, weights, params.weights_dtype, row, params.slots, params.width,
                                     column, active, lane);
  if (!active) return;
  if (params.has_shared != 0) {
    float gate = params.has_gate != 0 ? load_one(shared_gate, params.gate_dtype, row) : 1.0f;
    if (params.has_gate != 0 && params.gate_is_logit != 0) gate = sigmoid(gate);
    const Pack<N> x = widen(raw_shared);
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) sum.v[i] += gate * x.v[i];
  }
  if (params.has_residual != 0) {
    const Pack<N> x = widen(raw_residual);
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) sum.v[i] += x.v[i];
  }
  store_pack(output + place, sum);
}
template <typename T>
[[kernel]] void weighted_sum_rows(
    device const T* slots [[buffer(0)]], device const uchar* weights [[buffer(1)]],
    device const uchar* shared_gate [[buffer(2)]], device const T* shared [[buffer(3)]],
    device const T* residual [[buffer(4)]], device T* output [[buffer(5)]],
    constant WeightedSumParams& arguments [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 group_threads [[threads_per_threadgroup]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const WeightedSumParams params = arguments;
  const uint item = group.x * group_threads.x + thread_index;
  if (params.vectorised != 0) {
    weighted_sum_columns<T, 4>(slots, weights, shared_gate, shared, residual, output, params, group.y,
                               item * 4, lane);
  } else {
    weighted_sum_columns<T, 1>(slots, weights, shared_gate, shared, residual, output, params, group.y, item,
                               lane);
  }
}
constant constexpr uint kKeptSums = 4;
template <int N>
inline Pack<N> added(Pack<N> a, Pack<N> b) {
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) a.v[i] += b.v[i];
  return a;
}
template <int N>
inline Pack<N> scaled(Pack<N> x, float factor, Pack<N> weight) {
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) x.v[i] *= factor * weight.v[i];
  return x;
}
template <typename T, int N>
inline void weighted_sum_norm_row(device T* residual, device const T* slots, device const uchar* weights,
                                  device const uchar* norm_weight, device T* output,
                                  WeightedSumNormParams params, ulong row, uint thread_index, uint threads,
                                  uint lane, uint simdgroup, uint simdgroups, threadgroup float* partials) {
  const ulong start = row * params.width;
  const uint step = threads * N;
  const uint first_column = thread_index * N;
  Raw<T, N> kept[kKeptSums];
  AnyRaw<N> first_weight;
  if (first_column < params.width)
    first_weight = load_any_raw<N>(norm_weight, params.norm_dtype, first_column);
  float squares = 0.0f;
#pragma clang loop unroll(full)
         for (uint k = 0; k < kKeptSums; ++k) {
    if (k * step < params.width) {
      const uint column = k * step + first_column;
      const bool active = column < params.width;
      Raw<T, N> base;
      if (active) base = load_raw<N>(residual + start + column);
      const Pack<N> sum = sum_over_slots<T, N>(slots, weights, params.weights_dtype, row, params.slots,
                                               params.width, column, active, lane);
      if (active) {
        kept[k] = narrow<T>(added(widen(base), sum));
        store_raw(residual + start + column, kept[k]);
        squares += sum_of_squares(widen(kept[k]));
      }
    }
  }
  for (uint group = kKeptSums * step; group < params.width; group += step) {
    const uint column = group + first_column;
    const bool active = column < params.width;
    const Pack<N> sum = sum_over_slots<T, N>(slots, weights, params.weights_dtype, row, params.slots,
                                             params.width, column, active, lane);
    if (active) {
      const Raw<T, N> x = narrow<T>(added(load_pack<N>(residual + start + column), sum));
      store_raw(residual + start + column, x);
      squares += sum_of_squares(widen(x));
    }
  }
  const float total = threadgroup_sum(squares, partials, lane, simdgroup, simdgroups);
  const float inverse = precise::rsqrt(total / float(params.width) + params.eps);
#pragma clang loop unroll(full)
         for (uint k = 0; k < kKeptSums; ++k) {
    const uint column = k * step + first_column;
    if (column < params.width) {
      const Pack<N> weight = k == 0 ? widen(first_weight, params.norm_dtype)
                                    : load_any<N>(norm_weight, params.norm_dtype, column);
      store_pack(output + start + column, scaled(widen(kept[k]), inverse, weight));
    }
  }
  for (uint column = kKeptSums * step + first_column; column < params.width; column += step) {
    const Pack<N> weight = load_any<N>(norm_weight, params.norm_dtype, column);
    store_pack(output + start + column, scaled(load_pack<N>(residual + start + column), inverse, weight));
  }
}
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSumNormThreads)]] void weighted_sum_norm_rows(
    device T* residual [[buffer(0)]], device const T* slots [[buffer(1)]],
    device const uchar* weights [[buffer(2)]], device const uchar* norm_weight [[buffer(3)]],
    device T* output [[buffer(4)]], constant WeightedSumNormParams& arguments [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const WeightedSumNormParams params = arguments;
  threadgroup float partials[kMaxSimdgroups];
  const uint threads = simdgroups * kSimdWidth;
  if (params.vectorised != 0) {
    weighted_sum_norm_row<T, 4>(residual, slots, weights, norm_weight, output, params, row, thread_index,
                                threads, lane, simdgroup, simdgroups, partials);
  } else {
    weighted_sum_norm_row<T, 1>(residual, slots, weights, norm_weight, output, params, row, thread_index,
                                threads, lane, simdgroup, simdgroups, partials);
  }
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
template <typename T, int N>
inline void combine_columns(device const T* slots, device const int* ids, device const uchar* routing,
                            device const uchar* shared_gate, device const uchar* shared_out,
                            device const uchar* residual, device T* out, uint token, uint column,
                            constant ExpertDownParams& params) {
  constant ExpertParams& matmul = params.matmul;
  Pack<N> sums;
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) sums.v[i] = 0.0f;
  for (uint slot = 0; slot < matmul.slots; ++slot) {
    const uint pair = token * matmul.slots + slot;
    if (expert_of(ids, pair, matmul) == matmul.experts) continue;
    const float weight = load_one(routing, params.combine.weights_dtype, pair);
    const Pack<N> terms = load_pack<N>(slots + ulong(pair) * matmul.outputs + column);
#pragma clang loop unroll(full)
           for (int i = 0; i < N; ++i) sums.v[i] = fma(weight, terms.v[i], sums.v[i]);
  }
#pragma clang loop unroll(full)
         for (int i = 0; i < N; ++i) {
    sums.v[i] = combined(sums.v[i], token, column + i, matmul.outputs, shared_gate, shared_out, residual,
                         dtype_of<T>(), params.combine);
  }
  store_pack(out + ulong(token) * matmul.outputs + column, sums);
}
template <typename T>
[[kernel]] void expert_combine(device const T* slots [[buffer(0)]], device const int* ids [[buffer(1)]],
                               device const uchar* routing [[buffer(2)]],
                               device const uchar* shared_gate [[buffer(3)]],
                               device const uchar* shared_out [[buffer(4)]],
                               device const uchar* residual [[buffer(5)]], device T* out [[buffer(6)]],
                               constant ExpertDownParams& params [[buffer(7)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint2 threads [[threads_per_threadgroup]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
  const uint outputs = params.matmul.outputs;
  const uint column = (group.x * threads.x + thread_index) * kCombineColumns;
  if (outputs % kCombineColumns == 0) {
    if (column >= outputs) return;
    combine_columns<T, kCombineColumns>(slots, ids, routing, shared_gate, shared_out, residual, out, group.y,
                                        column, params);
  } else {
    for (uint i = column; i < min(column + kCombineColumns, outputs); ++i) {
      combine_columns<T, 1>(slots, ids, routing, shared_gate, shared_out, residual, out, group.y, i, params);
    }
  }
}
template[[host_name("silu_mul_stacked" "_bf16")]] [[kernel]] decltype(silu_mul_stacked<bfloat>) silu_mul_stacked<bfloat>;
template[[host_name("weighted_sum" "_bf16")]] [[kernel]] decltype(weighted_sum_rows<bfloat>) weighted_sum_rows<bfloat>;
template[[host_name("weighted_sum_norm" "_bf16")]] [[kernel]] decltype(weighted_sum_norm_rows<bfloat>) weighted_sum_norm_rows<bfloat>;
template[[host_name("expert_combine" "_bf16")]] [[kernel]] decltype(expert_combine<bfloat>) expert_combine<bfloat>;
