// From logits to experts: one simdgroup per row. A lane holds N consecutive experts in registers, so the
// logits are read once and the lowest lane of a tie holds the lowest id.
#pragma once
#include "common.h"

// What a row of logits becomes. `key` orders the choice; `score` gives the weight. Keys below kLowestKey are
// states: 0 is not to be chosen, n is chosen for slot n - 1.
template <int N>
struct RouterRow {
  uint key[N];
  float score[N];
};

constant constexpr uint kLowestKey = 0x00400000u;  // below the key of -infinity

// NaN counts as the lowest float, infinities as the highest and lowest.
inline float finite(float x) {
  return isnan(x) ? -FLT_MAX : clamp(x, -FLT_MAX, FLT_MAX);
}

// An integer that orders as the float does. x is not NaN.
inline uint ordered_key(float x) {
  const uint bits = as_type<uint>(x == 0.0f ? 0.0f : x);  // -0 and 0 are a tie
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

inline bool is_chosen(uint key) {
  return key > 0 && key < kLowestKey;
}

// Chooses the `count` largest keys, ties to the lowest id. Each step is one reduction over the simdgroup: the
// winning lane, the lowest that holds the maximum, marks the expert with its slot and finds its next best.
template <int N>
inline void choose(thread RouterRow<N>& row, uint count, uint lane) {
  uint best = 0;
  UNROLL for (int j = 0; j < N; ++j) best = max(best, row.key[j]);
  for (uint slot = 0; slot < count; ++slot) {
    const uint highest = simd_max(best);
    if (lane == ctz(ballot(best == highest))) {
      best = 0;
      bool taken = false;
      UNROLL for (int j = 0; j < N; ++j) {
        if (!taken && row.key[j] == highest) {
          row.key[j] = slot + 1;
          taken = true;
        }
        best = row.key[j] >= kLowestKey ? max(best, row.key[j]) : best;
      }
    }
  }
}

// The sum of the scores of the chosen.
template <int N>
inline float chosen_sum(thread RouterRow<N>& row) {
  float sum = 0.0f;
  UNROLL for (int j = 0; j < N; ++j) sum += is_chosen(row.key[j]) ? row.score[j] : 0.0f;
  return simd_sum(sum);
}

// Replaces the scores of the chosen by their softmax.
template <int N>
inline void softmax_of_chosen(thread RouterRow<N>& row) {
  float highest = -FLT_MAX;
  UNROLL for (int j = 0; j < N; ++j) highest = is_chosen(row.key[j]) ? max(highest, row.score[j]) : highest;
  highest = simd_max(highest);
  UNROLL for (int j = 0; j < N; ++j) {
    row.score[j] = is_chosen(row.key[j]) ? precise::exp(row.score[j] - highest) : 0.0f;
  }
  const float sum = chosen_sum<N>(row);
  UNROLL for (int j = 0; j < N; ++j) row.score[j] /= sum;
}

// Divides the scores of the chosen by max(sum + eps, minimum); a denominator of 0 counts as 1. NaN stays: max
// would drop it.
template <int N>
inline void normalise_chosen(thread RouterRow<N>& row, float eps, float minimum) {
  const float sum = chosen_sum<N>(row) + eps;
  const float bounded = sum < minimum ? minimum : sum;
  const float denominator = bounded == 0.0f ? 1.0f : bounded;
  UNROLL for (int j = 0; j < N; ++j) row.score[j] /= denominator;
}

template <int N>
inline void scale_chosen(thread RouterRow<N>& row, device const uchar* scale, uint dtype, uint lane) {
  UNROLL for (int j = 0; j < N; ++j) {
    if (is_chosen(row.key[j])) row.score[j] *= load_one(scale, dtype, lane * N + j);
  }
}

template <int N>
inline void store_chosen(thread RouterRow<N>& row, uint lane, device float* weights, device int* ids) {
  UNROLL for (int j = 0; j < N; ++j) {
    if (is_chosen(row.key[j])) {
      weights[row.key[j] - 1] = row.score[j];
      ids[row.key[j] - 1] = int(lane * N + j);
    }
  }
}

// log(1 + exp(x)) without overflow, and without log1p, which Metal lacks: log(u) * y / (u - 1) undoes the
// rounding of u = 1 + y.
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

// The experts of this lane, as bits, that belong to the best groups. A group's score is the sum of the two
// largest of `by_sum`, or the largest of `by_max`.
template <int N>
inline uint experts_of_best_groups(thread const float* by_sum, thread const float* by_max,
                                   RouterParams params, uint lane) {
  const uint group_size = params.experts / params.groups;
  const bool is_max = params.group_score_is_max != 0;
  uint group_of[N];
  RouterRow<N> groups;  // a lane holds the groups lane * N + j
  UNROLL for (int j = 0; j < N; ++j) {
    group_of[j] = (lane * N + j) / group_size;
    groups.key[j] = 0;
    groups.score[j] = 0.0f;
  }
  for (uint group = 0; group < params.groups; ++group) {
    float2 top = float2(-INFINITY, -INFINITY);
    UNROLL for (int j = 0; j < N; ++j) {
      if (group_of[j] == group) {
        const float value = is_max ? by_max[j] : by_sum[j];
        top = float2(max(top.x, value), max(min(top.x, value), top.y));
      }
    }
    top = simd_top2(top);
    const uint key = ordered_key(is_max ? top.x : finite(top.x + top.y));
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j == group) groups.key[j] = key;
    }
  }
  choose<N>(groups, params.top_groups, lane);
  uint chosen_groups = 0;
  UNROLL for (int j = 0; j < N; ++j) chosen_groups |= is_chosen(groups.key[j]) ? 1u << j : 0u;
  uint members = 0;
  UNROLL for (int j = 0; j < N; ++j) {
    const uint group = min(group_of[j], params.groups - 1);
    const uint holder = simd_shuffle(chosen_groups, ushort(group / N));
    members |= ((holder >> (group % N)) & 1) << j;
  }
  return members;
}

// Fills `row` with what is compared and what becomes the weight.
template <int N>
inline void rank_experts(thread const float* logits, thread RouterRow<N>& row, device const uchar* bias,
                         RouterParams params, uint lane) {
  const uint first = lane * N;
  const int valid = int(min(params.experts > first ? params.experts - first : 0u, uint(N)));
  score_row<N>(logits, row.score, params.scoring, valid);

  float choice[N];
  const bool by_logits = params.bias_on_logits != 0 || params.scoring == SCORING_SOFTMAX_AFTER_TOPK;
  UNROLL for (int j = 0; j < N; ++j) {
    choice[j] = by_logits ? logits[j] : row.score[j];
    if (params.has_bias != 0 && j < valid)
      choice[j] = finite(choice[j] + load_one(bias, params.bias_dtype, first + j));
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
inline void load_logits(device const T* source, thread float* logits, RouterParams params, uint lane) {
  UNROLL for (int j = 0; j < N; ++j) logits[j] = 0.0f;
  if (N % 4 == 0 && params.vectorised != 0) {
    Raw<T, 4> raw[(N + 3) / 4];
    UNROLL for (int j = 0; j + 3 < N; j += 4) {
      if (lane * N + j < params.experts) raw[j / 4] = load_raw<4>(source + lane * N + j);
    }
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) logits[j] = finite(float(raw[j / 4].v[j % 4]));
    }
  } else {
    T raw[N];
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) raw[j] = source[lane * N + j];
    }
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) logits[j] = finite(float(raw[j]));
    }
  }
}

// One row per simdgroup; N * 32 is at least the number of experts.
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
  float own_logits[N];
  load_logits<N>(logits + row * params.experts, own_logits, params, lane);
  RouterRow<N> ranked;
  rank_experts<N>(own_logits, ranked, bias, params, lane);
  choose<N>(ranked, params.top_k, lane);

  if (params.scoring == SCORING_SOFTMAX_AFTER_TOPK) softmax_of_chosen<N>(ranked);
  if (params.normalise != 0) normalise_chosen<N>(ranked, params.norm_eps, params.norm_min);
  UNROLL for (int j = 0; j < N; ++j) ranked.score[j] *= params.scaling_factor;
  if (params.has_scale != 0) scale_chosen<N>(ranked, per_expert_scale, params.scale_dtype, lane);
  store_chosen<N>(ranked, lane, weights + row * params.top_k, ids + row * params.top_k);
}
