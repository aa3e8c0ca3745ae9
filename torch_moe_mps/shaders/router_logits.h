// A router's matmul, with the RMSNorm in front of it or without. The choice is the router's kernel.
#pragma once
#include "common/any_stores.h"
#include "common/any_vectors.h"
#include "common/sums.h"
#include "geometry/routing.h"
#include "params/routing.h"

template <int R, int M>
struct LogitSums {
  float logits[R][M];
  float squares[M];
};

// Where R experts times M tokens begin.
struct LogitBlock {
  uint expert, token;
};

// The sums over a share of the columns: blocks of U vectors a lane, of which each `shares`-th is taken. All U
// are in flight together. Past the last expert or token the last one is read again, and its result is not
// stored.
template <typename W, bool kNormed, int R, int M, int N, int U>
inline LogitSums<R, M> logit_sums(device const uchar* hidden, device const W* router,
                                  device const uchar* norm_weight, LogitBlock block, uint share, uint shares,
                                  uint lane, constant RouterLogitsParams& params) {
  constexpr uint kStep = kSimdWidth * N;
  const uint width = params.width;
  LogitSums<R, M> sums = {};
  uint row_starts[R];
  UNROLL for (int r = 0; r < R; ++r) row_starts[r] = min(block.expert + r, params.experts - 1) * width;
  const uint size = params.hidden_dtype == DTYPE_FLOAT ? sizeof(float) : sizeof(ushort);
  hidden += ulong(block.token) * width * size;
  uint token_starts[M];  // from there on
  UNROLL for (int m = 0; m < M; ++m) {
    token_starts[m] = min(uint(m), params.tokens - 1 - block.token) * width;
  }
  for (uint first = share * U * kStep + lane * N; first < width; first += shares * U * kStep) {
    Vector<W, N> rows[U][R];
    AnyVector<N> tokens[U][M], norm[U];
    UNROLL for (int u = 0; u < U; ++u) {
      const uint column = first + u * kStep;
      if (column >= width) continue;
      UNROLL for (int r = 0; r < R; ++r) rows[u][r] = load<N>(router + (row_starts[r] + column));
      UNROLL for (int m = 0; m < M; ++m) {
        tokens[u][m] = load_any_raw<N>(hidden, params.hidden_dtype, token_starts[m] + column);
      }
      if constexpr (kNormed) norm[u] = load_any_raw<N>(norm_weight, params.norm_dtype, column);
    }
    UNROLL for (int u = 0; u < U; ++u) {
      if (first + u * kStep >= width) continue;
      UNROLL for (int m = 0; m < M; ++m) {
        Floats<N> x = widen<N>(tokens[u][m], params.hidden_dtype);
        if constexpr (kNormed) {
          sums.squares[m] += sum_of_squares(x);
          x *= widen<N>(norm[u], params.norm_dtype) + params.norm_weight_offset;
        }
        UNROLL for (int r = 0; r < R; ++r) {
          sums.logits[r][m] = add_dot(sums.logits[r][m], widen(rows[u][r]), x);
        }
      }
    }
  }
  return sums;
}

template <bool kNormed>
inline void store_logit(device uchar* logits, float logit, float squares, device const uchar* bias,
                        uint expert, uint token, constant RouterLogitsParams& params) {
  logit *= params.factor;
  if constexpr (kNormed) logit *= precise::rsqrt(squares / float(params.width) + params.eps);
  if (params.has_bias != 0) logit += load_one(bias, params.bias_dtype, expert);
  store_any(logits, params.logits_dtype, ulong(token) * params.experts + expert, logit);
}

#define LOGITS_BUFFERS(W)                                                                    \
  device const uchar *hidden [[buffer(0)]], device const W *router [[buffer(1)]],            \
      device const uchar *norm_weight [[buffer(2)]], device const uchar *bias [[buffer(3)]], \
      device uchar *logits [[buffer(4)]], constant RouterLogitsParams &params [[buffer(5)]], \
      uint2 group [[threadgroup_position_in_grid]], LANES

// logits[tokens][experts] of R experts and M tokens a simdgroup. Grid: (blocks of experts, blocks of tokens).
template <typename W, bool kNormed, int R, int M>
[[kernel]] void router_logits(LOGITS_BUFFERS(W)) {
  const LogitBlock block = {(group.x * kLogitsSimdgroups + simdgroup) * R, group.y * M};
  if (block.expert >= params.experts) return;
  LogitSums<R, M> sums;
  if (params.vectorised != 0) {
    sums = logit_sums<W, kNormed, R, M, 4, 1>(hidden, router, norm_weight, block, 0, 1, lane, params);
  } else {
    sums = logit_sums<W, kNormed, R, M, 1, 1>(hidden, router, norm_weight, block, 0, 1, lane, params);
  }
  UNROLL for (int m = 0; m < M; ++m) {
    float squares = 0.0f;
    if constexpr (kNormed) squares = simd_sum(sums.squares[m]);
    UNROLL for (int r = 0; r < R; ++r) {
      const float logit = simd_sum(sums.logits[r][m]);
      const uint expert = block.expert + r, token = block.token + m;
      if (lane == 0 && expert < params.experts && token < params.tokens) {
        store_logit<kNormed>(logits, logit, squares, bias, expert, token, params);
      }
    }
  }
}

// The same of R experts and one token a threadgroup, whose simdgroups share the columns: few threadgroups
// wait for memory all the time, so each has as few steps as possible. Grid: (blocks of experts, tokens).
template <typename W, bool kNormed, int R>
[[kernel]] void router_logits_few(LOGITS_BUFFERS(W)) {
  threadgroup float partials[kLogitsSimdgroups][R + 1];
  const LogitBlock block = {group.x * R, group.y};
  LogitSums<R, 1> sums;
  if (params.vectorised != 0) {
    sums = logit_sums<W, kNormed, R, 1, 4, kLogitsUnroll>(hidden, router, norm_weight, block, simdgroup,
                                                          kLogitsSimdgroups, lane, params);
  } else {
    sums = logit_sums<W, kNormed, R, 1, 1, kLogitsUnroll>(hidden, router, norm_weight, block, simdgroup,
                                                          kLogitsSimdgroups, lane, params);
  }
  UNROLL for (int r = 0; r < R; ++r) {
    const float logit = simd_sum(sums.logits[r][0]);
    if (lane == 0) partials[simdgroup][r] = logit;
  }
  if constexpr (kNormed) {
    const float squares = simd_sum(sums.squares[0]);
    if (lane == 0) partials[simdgroup][R] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint expert = block.expert + lane;
  if (simdgroup > 0 || lane >= uint(R) || expert >= params.experts) return;
  float logit = 0.0f, squares = 0.0f;
  UNROLL for (uint i = 0; i < kLogitsSimdgroups; ++i) {
    logit += partials[i][lane];
    if constexpr (kNormed) squares += partials[i][R];
  }
  store_logit<kNormed>(logits, logit, squares, bias, expert, block.token, params);
}
