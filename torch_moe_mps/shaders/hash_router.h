// A router whose choice a table has: the logits of those experts alone, and their weights.
#pragma once
#include "router.h"
#include "router_logits.h"

constant constexpr int kSlotsOfLane = 2;  // top_k is at most 64

inline long integer_at(device const uchar* source, uint is_wide, ulong index) {
  if (is_wide != 0) return reinterpret_cast<device const long*>(source)[index];
  return reinterpret_cast<device const int*>(source)[index];
}

// The logit of an expert, which no other simdgroup computes.
template <typename W, bool kNormed>
inline float logit_of(device const uchar* hidden, device const W* router, device const uchar* norm_weight,
                      LogitBlock block, uint lane, constant RouterLogitsParams& params) {
  LogitSums<1, 1> sums;
  if (params.vectorised != 0) {
    sums = logit_sums<W, kNormed, 1, 1, 4, kLogitsUnroll>(hidden, router, norm_weight, block, 0, 1, lane,
                                                          params);
  } else {
    sums = logit_sums<W, kNormed, 1, 1, 1, kLogitsUnroll>(hidden, router, norm_weight, block, 0, 1, lane,
                                                          params);
  }
  const float logit = simd_sum(sums.logits[0][0]);
  if constexpr (!kNormed) return logit;
  return logit * precise::rsqrt(simd_sum(sums.squares[0]) / float(params.width) + params.eps);
}

// A threadgroup for each token, whose simdgroups share the slots.
template <typename W, bool kNormed>
[[kernel]] void hash_route(device const uchar* hidden [[buffer(0)]], device const W* router [[buffer(1)]],
                           device const uchar* norm_weight [[buffer(2)]],
                           device const uchar* table [[buffer(3)]], device const uchar* tokens [[buffer(4)]],
                           device float* weights [[buffer(5)]], device int* ids [[buffer(6)]],
                           constant HashRouterParams& params [[buffer(7)]],
                           uint token [[threadgroup_position_in_grid]], LANES) {
  threadgroup float scores[kSlotsOfLane * kSimdWidth];
  const ulong first = ulong(token) * params.top_k;
  const long row = integer_at(tokens, params.wide_tokens, token);
  const bool is_known = row >= 0 && row < long(params.table_rows);
  const Scoring scoring = {params.scoring, 0.0f, 1.0f};
  for (uint slot = simdgroup; slot < params.top_k; slot += kLogitsSimdgroups) {
    const long id = is_known ? integer_at(table, params.wide_table, row * params.top_k + slot) : -1;
    const bool exists = id >= 0 && id < long(params.logits.experts);
    Values<1> score = {{0.0f}};
    if (exists) {
      const LogitBlock block = {uint(id), token};
      score.v[0] = finite(logit_of<W, kNormed>(hidden, router, norm_weight, block, lane, params.logits));
      score = scoring.of<1>(score);
    }
    if (lane == 0) {
      scores[slot] = score.v[0];
      ids[first + slot] = exists ? int(id) : -1;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0) return;
  Values<kSlotsOfLane> values;
  UNROLL for (int j = 0; j < kSlotsOfLane; ++j) {
    const uint slot = j * kSimdWidth + lane;
    values.v[j] = slot < params.top_k ? scores[slot] : 0.0f;
  }
  if (params.normalise != 0) normalise<kSlotsOfLane>(values, params.sum_eps, -INFINITY);
  UNROLL for (int j = 0; j < kSlotsOfLane; ++j) {
    const uint slot = j * kSimdWidth + lane;
    if (slot < params.top_k) weights[first + slot] = values.v[j] * params.scaling_factor;
  }
}
