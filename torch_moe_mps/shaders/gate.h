// moe_gate: RMSNorm, router matmul and top-k in one dispatch. A threadgroup serves M tokens; a simdgroup
// takes kGateRows experts at a time and its lanes stride over the columns, so that router rows are read
// coalesced and once for M tokens.
#pragma once
#include "router.h"

constant constexpr int kGateRows = 4;

template <int M>
struct GateSums {
  float v[kGateRows][M];
};

struct GateThread {
  uint lane;
  uint simdgroup;
  uint simdgroups;
};

// Writes hidden * norm_weight for `columns` columns from `start` to tile[M][tile_width]; returns this
// thread's part of the sum of squares of hidden, of token `simdgroup / (simdgroups / M)`. The factor
// rsqrt(mean) is applied to the logits.
template <int M, int N>
inline float stage_tokens(device const uchar* hidden, uint hidden_dtype, device const uchar* norm_weight,
                          threadgroup float* tile, constant GateParams& params, uint first_token, uint start,
                          uint columns, GateThread thread_place) {
  const uint simdgroups_per_token = thread_place.simdgroups / M;
  const uint token = thread_place.simdgroup / simdgroups_per_token;
  const uint part = thread_place.simdgroup % simdgroups_per_token;
  const bool exists = first_token + token < params.tokens;
  const ulong row = ulong(first_token + token) * params.width + start;
  threadgroup float* target = tile + token * params.tile_width;
  float squares = 0.0f;
  for (uint column = (part * kSimdWidth + thread_place.lane) * N; column < columns;
       column += simdgroups_per_token * kSimdWidth * N) {
    Pack<N> x;
    UNROLL for (int i = 0; i < N; ++i) x.v[i] = 0.0f;
    if (exists) x = load_any<N>(hidden, hidden_dtype, row + column);
    squares += sum_of_squares(x);
    const Pack<N> weight = load_any<N>(norm_weight, params.norm_dtype, start + column);
    if constexpr (N == 4) {
      *reinterpret_cast<threadgroup float4*>(target + column) =
          float4(x.v[0] * weight.v[0], x.v[1] * weight.v[1], x.v[2] * weight.v[2], x.v[3] * weight.v[3]);
    } else {
      UNROLL for (int i = 0; i < N; ++i) target[column + i] = x.v[i] * weight.v[i];
    }
  }
  return squares;
}

// One simdgroup's rows at its lanes' columns.
template <typename W, int N>
struct GateWeights {
  Raw<W, N> row[kGateRows];
};

// `rows` points to the first expert's row; of the kGateRows from there on `count` exist, the last stands in
// for the others.
template <typename W, int N>
inline GateWeights<W, N> load_weights(device const W* rows, uint count, uint width, uint column) {
  GateWeights<W, N> weights;
  UNROLL for (uint r = 0; r < kGateRows; ++r) {
    weights.row[r] = load_raw<N>(rows + ulong(min(r, count - 1)) * width + column);
  }
  return weights;
}

template <typename W, int M, int N>
inline void multiply_columns(GateWeights<W, N> weights, threadgroup const float* tile, uint tile_width,
                             thread GateSums<M>& sums) {
  UNROLL for (int m = 0; m < M; ++m) {
    float x[N];
    if constexpr (N == 4) {
      const float4 raw = *reinterpret_cast<threadgroup const float4*>(tile + m * tile_width);
      UNROLL for (int i = 0; i < N; ++i) x[i] = raw[i];
    } else {
      UNROLL for (int i = 0; i < N; ++i) x[i] = tile[m * tile_width + i];
    }
    UNROLL for (int r = 0; r < kGateRows; ++r) {
      const Pack<N> w = widen(weights.row[r]);
      UNROLL for (int i = 0; i < N; ++i) sums.v[r][m] += w.v[i] * x[i];
    }
  }
}

// logits[M][experts], still without the tokens' rsqrt(mean). Returns this thread's part of the sum of
// squares. The next weights are loaded before those at hand are used, the first ones before the tokens are
// staged: with one token, one threadgroup has to keep enough bytes in flight to read the whole router (22.6
// us without, 17.8 us with it on an H200).
template <typename W, int M, int N>
inline float gate_logits(device const uchar* hidden, uint hidden_dtype, device const W* router,
                         device const uchar* norm_weight, threadgroup float* tile, threadgroup float* logits,
                         constant GateParams& params, uint first_token, GateThread place) {
  constexpr bool kPipelined = M < 16;  // with 16 tokens the registers are full
  constexpr uint kStep = kSimdWidth * N;
  const uint block = place.simdgroups * kGateRows;
  const bool one_tile = params.width <= params.tile_width;
  const uint lane_column = place.lane * N;
  float squares = 0.0f;
  for (uint block_start = 0; block_start < params.experts; block_start += block) {
    const uint first_expert = block_start + place.simdgroup * kGateRows;
    const uint experts =
        first_expert < params.experts ? min(params.experts - first_expert, uint(kGateRows)) : 0;
    device const W* rows = router + ulong(first_expert) * params.width;
    GateSums<M> sums;
    UNROLL for (int r = 0; r < kGateRows; ++r) {
      UNROLL for (int m = 0; m < M; ++m) sums.v[r][m] = 0.0f;
    }
    for (uint start = 0; start < params.width; start += params.tile_width) {
      const uint columns = min(params.tile_width, params.width - start);
      uint column = lane_column;
      uint left = experts > 0 && column < columns ? (columns - column + kStep - 1) / kStep : 0;
      GateWeights<W, N> weights;
      if (left > 0) weights = load_weights<W, N>(rows, experts, params.width, start + column);
      if (block_start == 0 || !one_tile) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile before this one has been read
        const float part = stage_tokens<M, N>(hidden, hidden_dtype, norm_weight, tile, params, first_token,
                                              start, columns, place);
        if (block_start == 0) squares += part;
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      for (; left > 1; --left) {
        if constexpr (kPipelined) {
          const GateWeights<W, N> next =
              load_weights<W, N>(rows, experts, params.width, start + column + kStep);
          multiply_columns<W, M, N>(weights, tile + column, params.tile_width, sums);
          weights = next;
        } else {
          multiply_columns<W, M, N>(weights, tile + column, params.tile_width, sums);
          weights = load_weights<W, N>(rows, experts, params.width, start + column + kStep);
        }
        column += kStep;
      }
      if (left > 0) multiply_columns<W, M, N>(weights, tile + column, params.tile_width, sums);
    }
    UNROLL for (int r = 0; r < kGateRows; ++r) {
      UNROLL for (int m = 0; m < M; ++m) {
        const float logit = simd_sum(sums.v[r][m]);
        if (place.lane == 0 && uint(r) < experts) logits[m * params.experts + first_expert + r] = logit;
      }
    }
  }
  return squares;
}

// Top-k of one token by one simdgroup.
template <int N>
inline void choose_experts(threadgroup const float* logits, float inverse_rms,
                           device const uchar* per_expert_scale, device float* weights, device int* ids,
                           constant GateParams& params, uint lane) {
  RouterRow<N> row;
  UNROLL for (int j = 0; j < N; ++j) {
    const uint expert = lane * N + j;
    row.key[j] = expert < params.experts ? ordered_key(finite(logits[expert] * inverse_rms)) : 0;
  }
  choose<N>(row, params.top_k, lane);
  UNROLL for (int j = 0; j < N; ++j) {
    row.score[j] = is_chosen(row.key[j]) ? finite(logits[lane * N + j] * inverse_rms) : 0.0f;
  }
  softmax_of_chosen<N>(row);
  scale_chosen<N>(row, per_expert_scale, params.scale_dtype, lane);
  if (params.renormalise != 0) normalise_chosen<N>(row, 0.0f, -INFINITY);
  store_chosen<N>(row, lane, weights, ids);
}

// threadgroup(0): tile[M][tile_width], logits[M][experts]. The simdgroups of a threadgroup are a multiple of
// M.
template <typename W, int M, int kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void gate_tokens(
    device const uchar* hidden [[buffer(0)]], device const W* router [[buffer(1)]],
    device const uchar* norm_weight [[buffer(2)]], device const uchar* per_expert_scale [[buffer(3)]],
    device float* weights [[buffer(4)]], device int* ids [[buffer(5)]],
    constant GateParams& params [[buffer(6)]], threadgroup float* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partials[kMaxSimdgroups];
  threadgroup float* logits = shared + M * params.tile_width;
  const GateThread place = {lane, simdgroup, simdgroups};
  const uint first_token = group * M;
  float squares;
  if (params.vectorised != 0) {
    squares = gate_logits<W, M, 4>(hidden, params.hidden_dtype, router, norm_weight, shared, logits, params,
                                   first_token, place);
  } else {
    squares = gate_logits<W, M, 1>(hidden, params.hidden_dtype, router, norm_weight, shared, logits, params,
                                   first_token, place);
  }
  squares = simd_sum(squares);
  if (lane == 0) partials[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const ulong token = first_token + simdgroup;
  if (simdgroup >= M || token >= params.tokens) return;
  const uint simdgroups_per_token = simdgroups / M;
  const float total =
      simd_sum(lane < simdgroups_per_token ? partials[simdgroup * simdgroups_per_token + lane] : 0.0f);
  const float inverse_rms = precise::rsqrt(total / float(params.width) + params.eps);
  threadgroup const float* row = logits + simdgroup * params.experts;
  device float* token_weights = weights + token * params.top_k;
  device int* token_ids = ids + token * params.top_k;
  if (params.experts <= 128) {
    choose_experts<4>(row, inverse_rms, per_expert_scale, token_weights, token_ids, params, lane);
  } else if (params.experts <= 256) {
    choose_experts<8>(row, inverse_rms, per_expert_scale, token_weights, token_ids, params, lane);
  } else {
    choose_experts<32>(row, inverse_rms, per_expert_scale, token_weights, token_ids, params, lane);
  }
}
