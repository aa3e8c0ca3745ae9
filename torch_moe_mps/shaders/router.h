// From logits to experts: one simdgroup per row. A lane holds N consecutive experts in registers, so the logits are read once and
// the lowest lane of a tie holds the lowest id.
#pragma once
#include "common.h"

constant constexpr uint kMaxTopK = 64;

// What a row of logits becomes: `key` orders the choice (0: not to be chosen any more), `score` gives the weight.
template <int N>
struct RouterRow {
  uint key[N];
  float score[N];
};

// The chosen experts; a lane holds the slots `lane` and `lane + 32`.
struct Chosen {
  uint id[2];
  float score[2];
};

// NaN counts as the lowest float, infinities as the highest and lowest.
inline float finite(float x) { return isnan(x) ? -FLT_MAX : clamp(x, -FLT_MAX, FLT_MAX); }

// An integer that orders as the float does, and is never 0. x is not NaN.
inline uint ordered_key(float x) {
  const uint bits = as_type<uint>(x == 0.0f ? 0.0f : x);  // -0 and 0 are a tie
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The `count` largest keys, ties to the lowest id: each step is one reduction over the simdgroup.
template <int N>
inline Chosen choose(thread RouterRow<N>& row, uint count, uint lane) {
  Chosen chosen = {{0, 0}, {0.0f, 0.0f}};
  uint best = 0;
  uint best_index = 0;
  float best_score = 0.0f;
  bool stale = true;
  for (uint slot = 0; slot < count; ++slot) {
    if (stale) {
      best = 0;
      UNROLL for (int j = 0; j < N; ++j) {
        if (row.key[j] > best) {
          best = row.key[j];
          best_index = j;
          best_score = row.score[j];
        }
      }
    }
    const uint highest = simd_max(best);
    const ushort winner = ushort(ctz(ballot(best == highest)));
    const uint id = simd_shuffle(lane * N + best_index, winner);
    const float score = simd_shuffle(best_score, winner);
    if (lane == slot % kSimdWidth) {
      if (slot < kSimdWidth) {
        chosen.id[0] = id;
        chosen.score[0] = score;
      } else {
        chosen.id[1] = id;
        chosen.score[1] = score;
      }
    }
    stale = lane == winner;
    if (stale) {
      UNROLL for (int j = 0; j < N; ++j) {
        if (uint(j) == best_index) row.key[j] = 0;
      }
    }
  }
  return chosen;
}

// Sums `value` over the chosen slots.
inline float chosen_sum(thread const float* value, uint count, uint lane) {
  const float first = lane < count ? value[0] : 0.0f;
  const float second = lane + kSimdWidth < count ? value[1] : 0.0f;
  return simd_sum(first + second);
}

// Replaces the scores of the chosen by their softmax.
inline void softmax_of_chosen(thread Chosen& chosen, uint count, uint lane) {
  const float first = lane < count ? chosen.score[0] : -FLT_MAX;
  const float second = lane + kSimdWidth < count ? chosen.score[1] : -FLT_MAX;
  const float highest = simd_max(max(first, second));
  for (int i = 0; i < 2; ++i) chosen.score[i] = precise::exp(chosen.score[i] - highest);
  const float sum = chosen_sum(chosen.score, count, lane);
  for (int i = 0; i < 2; ++i) chosen.score[i] /= sum;
}

// Divides the scores of the chosen by max(sum + eps, minimum); a denominator of 0 counts as 1.
inline void normalise_chosen(thread Chosen& chosen, uint count, uint lane, float eps, float minimum) {
  const float sum = max(chosen_sum(chosen.score, count, lane) + eps, minimum);
  const float denominator = sum == 0.0f ? 1.0f : sum;
  for (int i = 0; i < 2; ++i) chosen.score[i] /= denominator;
}

inline void scale_chosen(thread Chosen& chosen, uint count, uint lane, device const uchar* scale, uint dtype) {
  for (uint i = 0; i < 2; ++i) {
    if (lane + i * kSimdWidth < count) chosen.score[i] *= load_one(scale, dtype, chosen.id[i]);
  }
}

inline void store_chosen(Chosen chosen, uint count, uint lane, device float* weights, device int* ids) {
  for (uint i = 0; i < 2; ++i) {
    const uint slot = lane + i * kSimdWidth;
    if (slot < count) {
      weights[slot] = chosen.score[i];
      ids[slot] = int(chosen.id[i]);
    }
  }
}

// log(1 + exp(x)) without overflow, and without log1p, which Metal lacks: log(u) * y / (u - 1) undoes the rounding of u = 1 + y.
inline float softplus(float x) {
  const float y = precise::exp(-fabs(x));
  const float u = 1.0f + y;
  const float log1p = u == 1.0f ? y : precise::log(u) * y / (u - 1.0f);
  return max(x, 0.0f) + log1p;
}

// The scores of one row: N logits of this lane, of which those from `valid` on do not exist.
template <int N>
inline void score_row(thread const float* logits, thread float* scores, uint scoring, int valid) {
  if (scoring == SCORING_SOFTMAX) {
    float highest = -FLT_MAX;
    UNROLL for (int j = 0; j < N; ++j) highest = j < valid ? max(highest, logits[j]) : highest;
    highest = simd_max(highest);
    float sum = 0.0f;
    UNROLL for (int j = 0; j < N; ++j) {
      scores[j] = j < valid ? precise::exp(logits[j] - highest) : 0.0f;
      sum += scores[j];
    }
    sum = simd_sum(sum);
    UNROLL for (int j = 0; j < N; ++j) scores[j] /= sum;
  } else if (scoring == SCORING_SIGMOID) {
    UNROLL for (int j = 0; j < N; ++j) scores[j] = sigmoid(logits[j]);
  } else if (scoring == SCORING_SQRTSOFTPLUS) {
    UNROLL for (int j = 0; j < N; ++j) scores[j] = precise::sqrt(softplus(logits[j]));
  } else {
    UNROLL for (int j = 0; j < N; ++j) scores[j] = logits[j];
  }
}

// The largest and the second largest of all lanes' pairs.
inline float2 simd_top2(float2 top) {
  for (ushort distance = kSimdWidth / 2; distance > 0; distance /= 2) {
    const float2 other = float2(simd_shuffle_xor(top.x, distance), simd_shuffle_xor(top.y, distance));
    top = float2(max(top.x, other.x), max(min(top.x, other.x), max(top.y, other.y)));
  }
  return top;
}

// The experts of this lane, as bits, that belong to the best groups. `by_sum` gives the values of the sum of the two largest,
// `by_max` those of the maximum.
template <int N>
inline uint experts_of_best_groups(thread const float* by_sum, thread const float* by_max, constant RouterParams& params,
                                   uint lane) {
  const uint group_size = params.experts / params.groups;
  RouterRow<N> groups;  // group `lane * N + j`
  UNROLL for (int j = 0; j < N; ++j) {
    groups.key[j] = 0;
    groups.score[j] = 0.0f;
  }
  for (uint group = 0; group < params.groups; ++group) {
    float2 top = float2(-INFINITY, -INFINITY);
    UNROLL for (int j = 0; j < N; ++j) {
      const uint expert = lane * N + j;
      if (expert < params.experts && expert / group_size == group) {
        const float value = params.group_score_is_max != 0 ? by_max[j] : by_sum[j];
        top = float2(max(top.x, value), max(min(top.x, value), top.y));
      }
    }
    top = simd_top2(top);
    const uint key = ordered_key(params.group_score_is_max != 0 ? top.x : finite(top.x + top.y));
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j == group) groups.key[j] = key;
    }
  }
  uint members = 0;
  for (uint taken = 0; taken < params.top_groups; ++taken) {
    const Chosen best = choose<N>(groups, 1, lane);
    const uint group = simd_shuffle(best.id[0], ushort(0));
    UNROLL for (int j = 0; j < N; ++j) {
      if ((lane * N + j) / group_size == group) members |= 1u << j;
    }
  }
  return members;
}

// Fills `row` with what is compared and what becomes the weight.
template <int N>
inline void rank_experts(thread const float* logits, thread RouterRow<N>& row, device const uchar* bias,
                         constant RouterParams& params, uint lane) {
  const uint first = lane * N;
  const int valid = int(min(params.experts > first ? params.experts - first : 0u, uint(N)));
  score_row<N>(logits, row.score, params.scoring, valid);

  float choice[N];
  const bool by_logits = params.bias_on_logits != 0 || params.scoring == SCORING_SOFTMAX_AFTER_TOPK;
  UNROLL for (int j = 0; j < N; ++j) {
    choice[j] = by_logits ? logits[j] : row.score[j];
    if (params.has_bias != 0 && j < valid) choice[j] = finite(choice[j] + load_one(bias, params.bias_dtype, first + j));
  }
  // Without a bias the choice is monotone in the logits, which are exact where scores saturate.
  const bool compare_logits = params.has_bias == 0 && params.has_masked_score == 0;
  float compared[N];
  UNROLL for (int j = 0; j < N; ++j) compared[j] = compare_logits ? logits[j] : choice[j];

  uint members = ~0u;
  if (params.top_groups < params.groups) members = experts_of_best_groups<N>(choice, compared, params, lane);
  const float outside = params.has_masked_score != 0 ? params.masked_score : -INFINITY;
  UNROLL for (int j = 0; j < N; ++j) {
    const float value = ((members >> j) & 1) != 0 ? compared[j] : outside;
    row.key[j] = j < valid ? ordered_key(value) : 0;
  }
}

template <int N, typename T>
inline void load_logits(device const T* source, thread float* logits, constant RouterParams& params, uint lane) {
  UNROLL for (int j = 0; j < N; ++j) logits[j] = 0.0f;
  if (N % 4 == 0 && params.vectorised != 0) {
    UNROLL for (int j = 0; j + 3 < N; j += 4) {
      const uint expert = lane * N + j;
      if (expert < params.experts) {
        const Pack<4> pack = load_pack<4>(source + expert);
        UNROLL for (int i = 0; i < 4; ++i) logits[j + i] = finite(pack.v[i]);
      }
    }
  } else {
    UNROLL for (int j = 0; j < N; ++j) {
      const uint expert = lane * N + j;
      if (expert < params.experts) logits[j] = finite(float(source[expert]));
    }
  }
}

// One row per simdgroup; N * 32 is at least the number of experts.
template <typename T, int N>
[[kernel]] void route_rows(device const T* logits [[buffer(0)]], device const uchar* bias [[buffer(1)]],
                           device const uchar* per_expert_scale [[buffer(2)]], device float* weights [[buffer(3)]],
                           device int* ids [[buffer(4)]], constant RouterParams& params [[buffer(5)]],
                           uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  float own_logits[N];
  load_logits<N>(logits + row * params.experts, own_logits, params, lane);
  RouterRow<N> ranked;
  rank_experts<N>(own_logits, ranked, bias, params, lane);
  Chosen chosen = choose<N>(ranked, params.top_k, lane);

  if (params.scoring == SCORING_SOFTMAX_AFTER_TOPK) softmax_of_chosen(chosen, params.top_k, lane);
  if (params.normalise != 0) normalise_chosen(chosen, params.top_k, lane, params.norm_eps, params.norm_min);
  for (int i = 0; i < 2; ++i) chosen.score[i] *= params.scaling_factor;
  if (params.has_scale != 0) scale_chosen(chosen, params.top_k, lane, per_expert_scale, params.scale_dtype);
  store_chosen(chosen, params.top_k, lane, weights + row * params.top_k, ids + row * params.top_k);
}
