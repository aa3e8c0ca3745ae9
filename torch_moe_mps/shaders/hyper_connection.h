// Hyper-connections: a residual of up to four streams, which a block reads as one row.
#pragma once
#include "common/activations.h"
#include "common/any_vectors.h"
#include "common/sums.h"
#include "geometry/hyper_connection.h"
#include "params/hyper_connection.h"

constant constexpr uint kHyperFours = kHyperColumns / 4;

// Four columns of each stream after a block: post[n] * out + sum_m comb[m, n] * streams[m].
template <typename T>
struct StreamColumns {
  Vector<T, 4> rows[kMaxStreams];

  static StreamColumns load_at(device const T* streams, ulong token, uint column, HyperParams params) {
    StreamColumns x;
    UNROLL for (uint n = 0; n < kMaxStreams; ++n) {
      x.rows[n] = Vector<T, 4>(T(0.0f));
      if (n < params.streams) {
        x.rows[n] = load<4>(streams + (token * params.streams + n) * params.width + column);
      }
    }
    return x;
  }

  void update(device const T* out, device const float* post, device const float* comb, device T* updated,
              ulong token, uint column, HyperParams params) {
    const float4 added = widen(load<4>(out + token * params.width + column));
    float4 before[kMaxStreams];
    UNROLL for (uint n = 0; n < kMaxStreams; ++n) before[n] = widen(rows[n]);
    UNROLL for (uint n = 0; n < kMaxStreams; ++n) {
      if (n < params.streams) {
        const ulong row = token * params.streams + n;
        float4 mixed = params.has_comb != 0 ? float4(0.0f) : before[n];
        UNROLL for (uint m = 0; m < kMaxStreams; ++m) {
          if (params.has_comb != 0 && m < params.streams) {
            mixed += comb[(token * params.streams + m) * params.streams + n] * before[m];
          }
        }
        rows[n] = narrow<T>(post[row] * added + mixed);
        store_raw<4>(updated + row * params.width + column, rows[n]);
      }
    }
  }
};

template <typename T>
[[kernel]] void hyper_update(device const T* streams [[buffer(0)]], device const T* out [[buffer(1)]],
                             device const float* post [[buffer(2)]], device const float* comb [[buffer(3)]],
                             device T* updated [[buffer(4)]], constant HyperParams& params [[buffer(5)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = 4 * (group.x * kHyperThreads + thread_index);
  if (column >= params.width) return;
  StreamColumns<T> x = StreamColumns<T>::load_at(streams, group.y, column, params);
  x.update(out, post, comb, updated, group.y, column, params);
}

// A threadgroup takes kHyperColumns columns of the streams of kTokens tokens, updates them where there is a
// block's result, and writes its part of the products with the rows of `fn`, and of the sum of squares behind
// them: partials are [T, R + 1, slices]. Its simdgroups take rows; tokens share the loads of `fn`.
template <typename T, uint kTokens>
[[kernel]] void hyper_products(device const T* streams [[buffer(0)]], device const T* out [[buffer(1)]],
                               device const float* post [[buffer(2)]], device const float* comb [[buffer(3)]],
                               device T* updated [[buffer(4)]], device const uchar* fn [[buffer(5)]],
                               device float* partials [[buffer(6)]],
                               constant HyperParams& params [[buffer(7)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float4 staged[kTokens * kMaxStreams * kHyperFours];
  const uint first = group.y * kTokens, tokens = min(params.tokens - first, kTokens);
  for (uint i = thread_index; i < kTokens * kHyperFours; i += kHyperThreads) {
    const uint token = i / kHyperFours, four = i % kHyperFours;
    const uint column = group.x * kHyperColumns + 4 * four;
    StreamColumns<T> x;
    const bool is_there = token < tokens && column < params.width;
    if (is_there) {
      x = StreamColumns<T>::load_at(streams, first + token, column, params);
      if (params.has_out != 0) x.update(out, post, comb, updated, first + token, column, params);
    }
    UNROLL for (uint n = 0; n < kMaxStreams; ++n) {
      staged[(token * kMaxStreams + n) * kHyperFours + four] = is_there ? widen(x.rows[n]) : float4(0.0f);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint column = group.x * kHyperColumns + 4 * lane;
  for (uint row = simdgroup; row <= params.rows; row += kHyperThreads / kSimdWidth) {
    float sums[kTokens];
    UNROLL for (uint token = 0; token < kTokens; ++token) sums[token] = 0.0f;
    for (uint n = 0; n < params.streams; ++n) {
      float4 weights = 0.0f;
      if (row < params.rows && column < params.width) {
        const ulong start = (ulong(row) * params.streams + n) * params.width + column;
        weights = load_any<4>(fn, params.fn_dtype, start);
      }
      UNROLL for (uint token = 0; token < kTokens; ++token) {
        const float4 values = staged[(token * kMaxStreams + n) * kHyperFours + lane];
        sums[token] = add_dot(sums[token], values, row < params.rows ? weights : values);
      }
    }
    UNROLL for (uint token = 0; token < kTokens; ++token) {
      const float sum = simd_sum(sums[token]);
      if (lane == 0 && token < tokens) {
        partials[(ulong(first + token) * (params.rows + 1) + row) * params.slices + group.x] = sum;
      }
    }
  }
}

// The mixture of a token, of which lane 4 i + j of each half of a simdgroup has C[i, j]: its rows are
// summed over lanes whose numbers differ in the low two bits, its columns in the next two.
inline float sum_of_row(float value) {
  value += simd_shuffle_xor(value, 1);
  return value + simd_shuffle_xor(value, 2);
}
inline float sum_of_column(float value) {
  value += simd_shuffle_xor(value, 4);
  return value + simd_shuffle_xor(value, 8);
}

inline float mixture(float logit, bool is_there, HyperParams params) {
  float highest = is_there ? logit : -INFINITY;
  highest = max(highest, simd_shuffle_xor(highest, 1));
  highest = max(highest, simd_shuffle_xor(highest, 2));
  const float weight = is_there ? precise::exp(logit - highest) : 0.0f;
  float c = weight / sum_of_row(weight) + params.eps;
  c = is_there ? c : 0.0f;
  for (uint i = 0; i < params.iterations; ++i) {
    if (i > 0) {
      const float of_row = sum_of_row(c) + params.eps;
      c = is_there ? c / of_row : 0.0f;
    }
    const float of_column = sum_of_column(c) + params.eps;
    c = is_there ? c / of_column : 0.0f;
  }
  return c;
}

// A threadgroup takes 4 * kHyperThreads columns of a token. All add up the products that pre needs; post and
// comb are the work of the token's first one.
template <typename T>
[[kernel]] void hyper_mix(device const T* streams [[buffer(0)]], device const float* partials [[buffer(1)]],
                          device const uchar* base [[buffer(2)]], device const uchar* scale [[buffer(3)]],
                          device T* output [[buffer(4)]], device float* post [[buffer(5)]],
                          device float* comb [[buffer(6)]], constant HyperParams& params [[buffer(7)]],
                          uint2 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float sums[kMaxHyperRows + 1];
  threadgroup float pre[kMaxStreams];
  const ulong token = group.y;
  const uint column = 4 * (group.x * kHyperThreads + thread_index);
  StreamColumns<T> x;
  if (column < params.width) x = StreamColumns<T>::load_at(streams, token, column, params);
  for (uint row = simdgroup; row <= params.rows; row += kHyperThreads / kSimdWidth) {
    if (group.x != 0 && row >= params.streams && row < params.rows) continue;
    device const float* parts = partials + (token * (params.rows + 1) + row) * params.slices;
    float sum = 0.0f;
    for (uint i = lane; i < params.slices; i += kSimdWidth) sum += parts[i];
    sum = simd_sum(sum);
    if (lane == 0) sums[row] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint count = params.streams;
  const float mean = sums[params.rows] / (float(count) * float(params.width));
  const float inverse = precise::rsqrt(mean + params.norm_eps);
  if (thread_index < count) {
    const float factor = load_one(scale, params.scale_dtype, 0);
    const float shift = load_one(base, params.base_dtype, thread_index);
    pre[thread_index] = sigmoid(sums[thread_index] * inverse * factor + shift) + params.eps;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (column < params.width) {
    float4 total = 0.0f;
    UNROLL for (uint n = 0; n < kMaxStreams; ++n) {
      if (n < count) total += pre[n] * widen(x.rows[n]);
    }
    store(output + token * params.width + column, total);
  }
  if (group.x != 0 || simdgroup != 0) return;
  if (params.rows > count && lane < count) {
    const uint row = count + lane;
    const float factor = load_one(scale, params.scale_dtype, 1);
    const float logit = sums[row] * inverse * factor + load_one(base, params.base_dtype, row);
    post[token * count + lane] = params.post_factor * sigmoid(logit) + params.post_eps;
  }
  if (params.rows > 2 * count) {
    const uint i = lane / 4 % 4, j = lane % 4;
    const bool is_there = i < count && j < count;
    const uint row = is_there ? 2 * count + i * count + j : 0;
    const float factor = load_one(scale, params.scale_dtype, 2);
    const float logit = sums[row] * inverse * factor + load_one(base, params.base_dtype, row);
    const float c = mixture(logit, is_there, params);
    if (is_there && lane < 16) comb[token * count * count + i * count + j] = c;
  }
}
