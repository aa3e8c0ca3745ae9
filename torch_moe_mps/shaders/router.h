// From logits to experts: one simdgroup per row. A lane holds N consecutive experts in registers, so the
// logits are read once and the lowest lane of a tie holds the lowest id.
#pragma once
#include "common/activations.h"
#include "common/dtypes.h"
#include "common/simdgroups.h"
#include "common/vectors.h"
#include "params/routing.h"

// Keys order the choice. Those below kLowestKey are states: 0 is not to be chosen, n is chosen for slot n
// - 1.
template <int N>
struct Keys {
  uint v[N];
};

// The logits at first; later the scores of the chosen experts, which become their weights.
template <int N>
struct Values {
  float v[N];
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
inline void choose(thread Keys<N>& keys, uint count, uint lane) {
  uint best = 0;
  UNROLL for (int j = 0; j < N; ++j) best = max(best, keys.v[j]);
  for (uint slot = 0; slot < count; ++slot) {
    const uint highest = simd_max(best);
    bool marks = lane == ctz(ballot(best == highest));
    if (N == 32 || marks) {  // with 32 experts a lane, a branch would take more registers than there are
      best = 0;
      UNROLL for (int j = 0; j < N; ++j) {
        const bool is_it = marks && keys.v[j] == highest;
        keys.v[j] = is_it ? slot + 1 : keys.v[j];
        marks = marks && !is_it;
        best = keys.v[j] >= kLowestKey ? max(best, keys.v[j]) : best;
      }
    }
  }
}

// The sum of the scores of the chosen experts; other scores are zero by then.
template <int N>
inline float sum_of(thread Values<N>& scores) {
  float sum = 0.0f;
  UNROLL for (int j = 0; j < N; ++j) sum += scores.v[j];
  return simd_sum(sum);
}

// Replaces the logits of the chosen by their softmax.
template <int N>
inline void softmax_of_chosen(Keys<N> keys, thread Values<N>& values) {
  float highest = -FLT_MAX;
  UNROLL for (int j = 0; j < N; ++j) highest = is_chosen(keys.v[j]) ? max(highest, values.v[j]) : highest;
  highest = simd_max(highest);
  UNROLL for (int j = 0; j < N; ++j) {
    values.v[j] = is_chosen(keys.v[j]) ? precise::exp(values.v[j] - highest) : 0.0f;
  }
  const float sum = sum_of(values);
  UNROLL for (int j = 0; j < N; ++j) values.v[j] /= sum;
}

// Divides the scores of the chosen by max(sum + eps, minimum); a denominator of 0 counts as 1. NaN stays: max
// would drop it.
template <int N>
inline void normalise(thread Values<N>& scores, float eps, float minimum) {
  const float sum = sum_of(scores) + eps;
  const float bounded = sum < minimum ? minimum : sum;
  const float denominator = bounded == 0.0f ? 1.0f : bounded;
  UNROLL for (int j = 0; j < N; ++j) scores.v[j] /= denominator;
}

template <int N>
inline void scale_chosen(Keys<N> keys, thread Values<N>& scores, device const uchar* scale, uint dtype,
                         uint lane) {
  UNROLL for (int j = 0; j < N; ++j) {
    if (is_chosen(keys.v[j])) scores.v[j] *= load_one(scale, dtype, lane * N + j);
  }
}

template <int N>
inline void store_chosen(Keys<N> keys, Values<N> scores, uint lane, device float* weights, device int* ids) {
  UNROLL for (int j = 0; j < N; ++j) {
    if (is_chosen(keys.v[j])) {
      weights[keys.v[j] - 1] = scores.v[j];
      ids[keys.v[j] - 1] = int(lane * N + j);
    }
  }
}

// Turns logits into scores; a softmax takes the whole row.
struct Scoring {
  uint kind;
  float highest, sum;

  template <int N>
  Values<N> of(Values<N> logits) const {
    Values<N> scores = logits;
    if (kind == SCORING_SOFTMAX) {
      UNROLL for (int j = 0; j < N; ++j) scores.v[j] = precise::exp(logits.v[j] - highest) / sum;
    } else if (kind == SCORING_SIGMOID) {
      UNROLL for (int j = 0; j < N; ++j) scores.v[j] = sigmoid(logits.v[j]);
    } else if (kind == SCORING_SQRTSOFTPLUS) {
      UNROLL for (int j = 0; j < N; ++j) scores.v[j] = precise::sqrt(softplus(logits.v[j]));
    }
    return scores;
  }
};

// `valid` is the number of logits that exist for this lane.
template <int N>
inline Scoring scoring_of(Values<N> logits, uint kind, int valid) {
  Scoring scoring = {kind, 0.0f, 1.0f};
  if (kind != SCORING_SOFTMAX) return scoring;
  scoring.highest = -FLT_MAX;
  UNROLL for (int j = 0; j < N; ++j) {
    scoring.highest = j < valid ? max(scoring.highest, logits.v[j]) : scoring.highest;
  }
  scoring.highest = simd_max(scoring.highest);
  scoring.sum = 0.0f;
  UNROLL for (int j = 0; j < N; ++j) {
    scoring.sum += j < valid ? precise::exp(logits.v[j] - scoring.highest) : 0.0f;
  }
  scoring.sum = simd_sum(scoring.sum);
  return scoring;
}

// The largest and the second largest value of all lanes.
inline float2 simd_top2(float2 top) {
  for (ushort distance = kSimdWidth / 2; distance > 0; distance /= 2) {
    const float2 other = float2(simd_shuffle_xor(top.x, distance), simd_shuffle_xor(top.y, distance));
    top = float2(max(top.x, other.x), max(min(top.x, other.x), max(top.y, other.y)));
  }
  return top;
}

// A bit for each expert of this lane: whether it belongs to one of the best groups. The score of a group is
// its largest value, or the sum of its two largest.
template <int N>
inline uint experts_of_best_groups(Values<N> values, RouterParams params, uint lane) {
  const uint group_size = params.experts / params.groups;
  const bool is_max = params.group_score_is_max != 0;
  Keys<N> groups;  // a lane holds the groups lane * N + j
  UNROLL for (int j = 0; j < N; ++j) groups.v[j] = 0;
  for (uint group = 0; group < params.groups; ++group) {
    const uint first = lane * N - group * group_size;  // of the lane's experts in the group, modulo 2^32
    float2 top = float2(-INFINITY, -INFINITY);
    UNROLL for (int j = 0; j < N; ++j) {
      if (first + j < group_size) {
        top = float2(max(top.x, values.v[j]), max(min(top.x, values.v[j]), top.y));
      }
    }
    top = simd_top2(top);
    const uint key = ordered_key(is_max ? top.x : finite(top.x + top.y));
    UNROLL for (int j = 0; j < N; ++j) {
      if (group - lane * N == uint(j)) groups.v[j] = key;
    }
  }
  choose<N>(groups, params.top_groups, lane);
  uint chosen_groups = 0;
  UNROLL for (int j = 0; j < N; ++j) chosen_groups |= is_chosen(groups.v[j]) ? 1u << j : 0u;
  uint members = 0;
  UNROLL for (int j = 0; j < N; ++j) {
    const uint group = min((lane * N + j) / group_size, params.groups - 1);
    const uint holder = simd_shuffle(chosen_groups, ushort(group / N));
    members |= ((holder >> (group % N)) & 1) << j;
  }
  return members;
}

// Without a bias the choice is monotone in the logits, which are exact where scores saturate.
inline bool compares_logits(RouterParams params) {
  return params.has_bias == 0 && params.has_masked_score == 0;
}

inline bool has_groups(RouterParams params) {
  return params.top_groups < params.groups;
}

// Whether experts are chosen by scores, or groups of them.
inline bool compares_scores(RouterParams params) {
  const bool by_logits = params.bias_on_logits != 0 || params.scoring == SCORING_SOFTMAX_AFTER_TOPK;
  return !by_logits && (has_groups(params) || !compares_logits(params));
}

// The values that are compared to choose the experts.
template <int N>
inline Keys<N> keys_of(Values<N> logits, Scoring scoring, device const uchar* bias, int valid,
                       RouterParams params, uint lane) {
  const bool compare_logits = compares_logits(params);
  Values<N> choice = logits;
  if (compares_scores(params)) choice = scoring.of(logits);
  if (params.has_bias != 0) {
    UNROLL for (int j = 0; j < N; ++j) {
      if (j < valid) choice.v[j] = finite(choice.v[j] + load_one(bias, params.bias_dtype, lane * N + j));
    }
  }
  uint members = ~0u;
  if (has_groups(params)) {
    members = compare_logits && params.group_score_is_max != 0
                  ? experts_of_best_groups<N>(logits, params, lane)
                  : experts_of_best_groups<N>(choice, params, lane);
  }
  const float outside = params.has_masked_score != 0 ? params.masked_score : -INFINITY;
  Keys<N> keys;
  UNROLL for (int j = 0; j < N; ++j) {
    const float compared = compare_logits ? logits.v[j] : choice.v[j];
    const float value = ((members >> j) & 1) != 0 ? compared : outside;
    keys.v[j] = j < valid ? ordered_key(value) : 0;
  }
  return keys;
}

template <int N, typename T>
inline Values<N> load_logits(device const T* source, RouterParams params, uint lane) {
  Values<N> logits;
  UNROLL for (int j = 0; j < N; ++j) logits.v[j] = 0.0f;
  if (N % 4 == 0 && params.vectorised != 0) {
    Vector<T, 4> raw[(N + 3) / 4];
    UNROLL for (int j = 0; j + 3 < N; j += 4) {
      if (lane * N + j < params.experts) raw[j / 4] = load<4>(source + lane * N + j);
    }
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) logits.v[j] = finite(float(raw[j / 4][j % 4]));
    }
  } else {
    T raw[N];
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) raw[j] = source[lane * N + j];
    }
    UNROLL for (int j = 0; j < N; ++j) {
      if (lane * N + j < params.experts) logits.v[j] = finite(float(raw[j]));
    }
  }
  return logits;
}

// Choice of a row of logits: the experts of a lane that are chosen, and what becomes their weights.
template <int N>
struct Choice {
  Keys<N> keys;
  Values<N> logits;
  Scoring scoring;

  // The expert that was chosen for a slot.
  uint expert_of(uint slot, uint lane) const {
    uint expert = 0;
    UNROLL for (int j = 0; j < N; ++j) expert = keys.v[j] == slot + 1 ? lane * N + j : expert;
    return simd_max(expert);
  }

  // The value of the expert that was chosen for a slot.
  float of_slot(Values<N> values, uint slot) const {
    float value = 0.0f;
    UNROLL for (int j = 0; j < N; ++j) value = keys.v[j] == slot + 1 ? values.v[j] : value;
    return simd_sum(value);
  }

  // The weights of all params.top_k experts.
  Values<N> weights(device const uchar* per_expert_scale, RouterParams params, uint lane) const {
    Values<N> values = scoring.of(logits);
    UNROLL for (int j = 0; j < N; ++j) values.v[j] = is_chosen(keys.v[j]) ? values.v[j] : 0.0f;
    if (params.scoring == SCORING_SOFTMAX_AFTER_TOPK) softmax_of_chosen<N>(keys, values);
    if (params.normalise != 0) normalise<N>(values, params.sum_eps, params.sum_min);
    UNROLL for (int j = 0; j < N; ++j) values.v[j] *= params.scaling_factor;
    if (params.has_scale != 0) scale_chosen<N>(keys, values, per_expert_scale, params.scale_dtype, lane);
    if (params.normalise_scaled != 0) normalise<N>(values, 0.0f, -INFINITY);
    return values;
  }
};

// The first `count` experts that a row of logits chooses; N * 32 is at least the number of experts. The
// scores of fewer than params.top_k are not known.
template <int N>
inline Choice<N> choice_of(Values<N> logits, device const uchar* bias, RouterParams params, uint count,
                           uint lane) {
  const int valid = int(min(params.experts > lane * N ? params.experts - lane * N : 0u, uint(N)));
  Scoring scoring = {params.scoring, 0.0f, 1.0f};
  if (count == params.top_k || compares_scores(params)) {
    scoring = scoring_of<N>(logits, params.scoring, valid);
  }
  Choice<N> choice = {keys_of<N>(logits, scoring, bias, valid, params, lane), logits, scoring};
  choose<N>(choice.keys, count, lane);
  return choice;
}

// One row per simdgroup.
template <typename T, int N>
[[kernel]] void route_rows(device const T* logits [[buffer(0)]], device const uchar* bias [[buffer(1)]],
                           device const uchar* per_expert_scale [[buffer(2)]],
                           device float* weights [[buffer(3)]], device int* ids [[buffer(4)]],
                           constant RouterParams& arguments [[buffer(5)]],
                           uint group [[threadgroup_position_in_grid]], LANES,
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  const RouterParams params = arguments;
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  const Values<N> values = load_logits<N>(logits + row * params.experts, params, lane);
  const Choice<N> choice = choice_of<N>(values, bias, params, params.top_k, lane);
  const Values<N> of_experts = choice.weights(per_expert_scale, params, lane);
  store_chosen<N>(choice.keys, of_experts, lane, weights + row * params.top_k, ids + row * params.top_k);
}
