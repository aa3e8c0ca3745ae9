// A router's matmul, for moe_gate with the RMSNorm in front of it. The choice is the router's kernel.
#pragma once
#include "common.h"

template <int R, int M>
struct LogitSums {
  float logits[R][M];
  float squares[M];
};

// R experts times M tokens; the lanes stride over the columns. Past the last expert or token the last one is
// read again, and its result is not stored.
template <typename W, bool kNormed, int R, int M, int N>
inline LogitSums<R, M> logit_sums(device const uchar* hidden, device const W* router,
                                  device const uchar* norm_weight, uint first_expert, uint first_token,
                                  uint lane, constant RouterLogitsParams& params) {
  const uint width = params.width;
  LogitSums<R, M> sums = {};
  for (uint column = lane * N; column < width; column += kSimdWidth * N) {
    Vector<W, N> rows[R];
    UNROLL for (int r = 0; r < R; ++r) {
      const uint expert = min(first_expert + r, params.experts - 1);
      rows[r] = load<N>(router + ulong(expert) * width + column);
    }
    Floats<N> norm;
    if constexpr (kNormed) norm = load_any<N>(norm_weight, params.norm_dtype, column);
    UNROLL for (int m = 0; m < M; ++m) {
      const uint token = min(first_token + m, params.tokens - 1);
      Floats<N> x = load_any<N>(hidden, params.hidden_dtype, ulong(token) * width + column);
      if constexpr (kNormed) {
        sums.squares[m] += sum_of_squares(x);
        x *= norm;
      }
      UNROLL for (int r = 0; r < R; ++r) {
        sums.logits[r][m] = add_dot(sums.logits[r][m], widen(rows[r]), x);
      }
    }
  }
  return sums;
}

// logits[tokens][experts] of R experts and M tokens a simdgroup. Grid: (blocks of experts, blocks of tokens).
template <typename W, bool kNormed, int R, int M>
[[kernel]] void router_logits(device const uchar* hidden [[buffer(0)]], device const W* router [[buffer(1)]],
                              device const uchar* norm_weight [[buffer(2)]],
                              device const uchar* bias [[buffer(3)]], device float* logits [[buffer(4)]],
                              constant RouterLogitsParams& params [[buffer(5)]],
                              uint2 group [[threadgroup_position_in_grid]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint first_expert = (group.x * kLogitsSimdgroups + simdgroup) * R, first_token = group.y * M;
  if (first_expert >= params.experts) return;
  LogitSums<R, M> sums;
  if (params.vectorised != 0) {
    sums =
        logit_sums<W, kNormed, R, M, 4>(hidden, router, norm_weight, first_expert, first_token, lane, params);
  } else {
    sums =
        logit_sums<W, kNormed, R, M, 1>(hidden, router, norm_weight, first_expert, first_token, lane, params);
  }
  UNROLL for (int m = 0; m < M; ++m) {
    float inverse = 1.0f;
    if constexpr (kNormed) {
      inverse = precise::rsqrt(simd_sum(sums.squares[m]) / float(params.width) + params.eps);
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const float logit = simd_sum(sums.logits[r][m]) * inverse;
      const uint expert = first_expert + r, token = first_token + m;
      if (lane == 0 && expert < params.experts && token < params.tokens) {
        const float shift = params.has_bias != 0 ? load_one(bias, params.bias_dtype, expert) : 0.0f;
        logits[ulong(token) * params.experts + expert] = logit + shift;
      }
    }
  }
}
