// Changes of a score, and the end of the sums over all keys.
#pragma once
#include "common/activations.h"
#include "common/dtypes.h"
#include "params/attention.h"

constant constexpr float kLowest = -3.402823466e38f;
constant constexpr int kNoQuery = -(1 << 30);  // in place of a position

// exp(x) of a difference of scores, at most 0, to |x| * 2^-23 of it: a product and an instruction, as MLX's
// attention has. What Metal makes of precise::exp is longer.
inline float exponential(float x) {
  return fast::exp2(M_LOG2E_F * x);
}

inline float lowest_of(uint dtype) {
  return dtype == DTYPE_FLOAT ? kLowest : dtype == DTYPE_HALF ? -65504.0f : -3.3895313892515355e38f;
}

inline float bias_in_order(int position, uint key, constant AttentionParams& params) {
  const int distance = position - int(key);
  return distance >= 0 && (params.window == 0 || distance < int(params.window)) ? 0.0f : -INFINITY;
}

// Number that the mask adds to a score: -INFINITY for a key that the token does not see. `position` is
// the last key that the token sees in order, or kNoQuery.
inline float bias_of(device const uchar* mask, ulong start, int position, uint key,
                     constant AttentionParams& params) {
  if (params.mask_kind == MASK_NONE) return bias_in_order(position, key, params);
  if (position == kNoQuery) return -INFINITY;
  const ulong token = ulong(position - params.first_position);
  const uint place = params.mask_kind == MASK_BITS ? key / 32 : key;
  const ulong index = start + token * params.mask_token_stride + ulong(place) * params.mask_key_stride;
  if (params.mask_kind == MASK_BITS) {
    const uint word = reinterpret_cast<device const uint*>(mask)[index];
    return (word >> (key % 32) & 1) != 0 ? 0.0f : -INFINITY;
  }
  if (params.mask_kind == MASK_BOOL) return mask[index] != 0 ? 0.0f : -INFINITY;
  const float bias = load_one(mask, params.mask_dtype, index);
  return bias <= lowest_of(params.mask_dtype) ? -INFINITY : bias;
}

// The results of a query over all its keys, and the sink of its head.
struct Total {
  float highest;
  float sum;
};

// The factor of the summed values; 0 if the query saw no key.
inline float final_factor(Total total, device const uchar* sinks, uint head,
                          constant AttentionParams& params) {
  if (!params.has_sinks) return total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
  const float sink = load_one(sinks, params.sinks_dtype, head);
  const float highest = max(total.highest, sink);
  const float factor = precise::exp(total.highest - highest);
  const float sum = total.sum * factor + precise::exp(sink - highest);
  return sum == 0.0f ? 0.0f : factor / sum;
}

// The factor of a result by its gate.
template <typename T>
inline float gate_factor(device const T* gate, uint row, uint column, constant AttentionParams& params) {
  const uint token = row / params.heads;
  const float x =
      float(gate[token_start(params.gate, token / params.tokens, token % params.tokens, row % params.heads) +
                 min(column, params.gate_width - 1)]);
  return params.gate_is_softplus != 0 ? softplus(x) : sigmoid(x);
}

template <typename T>
inline void store_result(device T* output, ulong index, float value, constant AttentionParams& params) {
  if (params.output_is_float != 0) {
    reinterpret_cast<device float*>(output)[index] = value;
  } else {
    output[index] = T(value);
  }
}

// Where the chunks leave their results for attention_merge: the values of all, then (highest, sum) of each.
inline device float* partial_values(device float* partials, uint chunk, uint row,
                                    constant AttentionParams& params) {
  return partials + (ulong(chunk) * params.rows + row) * params.v.width;
}

inline device float* partial_total(device float* partials, uint chunk, uint row,
                                   constant AttentionParams& params) {
  const ulong all_values = ulong(params.chunks) * params.rows * params.v.width;
  return partials + all_values + 2 * (ulong(chunk) * params.rows + row);
}
