// Codes and scales of the least weighted error that a search finds: see ops/families/quantize.py.
#pragma once
#include "common/vectors.h"
#include "geometry/quantize.h"
#include "params/quantize.h"
#include "quantize_moves.h"

// Sum and largest over a group's lanes, in all of them.
template <typename V>
inline V sum_of_lanes(V x, uint lanes) {
  for (uint distance = 1; distance < lanes; distance *= 2) x += simd_shuffle_xor(x, ushort(distance));
  return x;
}
inline float max_of_lanes(float x, uint lanes) {
  for (uint distance = 1; distance < lanes; distance *= 2) x = max(x, simd_shuffle_xor(x, ushort(distance)));
  return x;
}

struct Line {
  float scale, bias;
};

// The nearest codes of a line, which is rounded to the weights' dtype.
struct AffineCodes {
  Line line;
  float inverse, largest;

  template <typename T>
  static AffineCodes of(Line line, float largest) {
    const float scale = float(T(line.scale));
    // A scale that is zero as it is stored makes codes of zero.
    return {{scale, float(T(line.bias))}, scale == 0.0f ? 0.0f : 1.0f / scale, largest};
  }

  float code(float w) const { return clamp(rint((w - line.bias) * inverse), 0.0f, largest); }
  float nearest(float w) const { return code(w) * line.scale + line.bias; }
};

// A thread's weights of a group, and where its results belong. All lanes take part in the shuffles: those
// behind the last row have its numbers.
struct GroupPart {
  float w[kQuantized];
  float k[kQuantized];  // importance, of which each has a least share
  uint lanes;           // of the group
  bool exists;
  ulong part;  // of all

  template <typename T>
  GroupPart(device const T* weight, device const float* importance, constant QuantizeParams& params,
            uint2 position)
      : lanes(params.lanes) {
    const uint threads = params.rows * params.parts, index = min(position.x, threads - 1);
    const uint row = index / params.parts, column = index % params.parts * kQuantized;
    exists = position.x < threads;
    part = ulong(position.y) * threads + index;
    weight += position.y * params.expert_stride + row * params.row_stride + column;
    importance += position.y * params.importance_stride + column;
    float total = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; i += 4) {
      const float4 four = widen(load<4>(weight + i)), weighed = load<4>(importance + i);
      UNROLL for (uint j = 0; j < 4; ++j) {
        w[i + j] = four[j];
        k[i + j] = weighed[j];
        total += weighed[j];
      }
    }
    const float least = sum_of_lanes(total, lanes) * (kLeastShare[0] / float(lanes * kQuantized));
    UNROLL for (uint i = 0; i < kQuantized; ++i) k[i] = max(k[i], least);
  }

  // Error of the group, sum k (w - decoded)^2.
  float error_of(AffineCodes codes) const {
    float error = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; ++i) {
      const float difference = codes.nearest(w[i]) - w[i];
      error = fma(difference * difference, k[i], error);
    }
    return sum_of_lanes(error, lanes);
  }

  // The largest |w - decoded| of the group.
  float farthest_of(AffineCodes codes) const {
    float farthest = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; ++i) farthest = max(farthest, fabs(codes.nearest(w[i]) - w[i]));
    return max_of_lanes(farthest, lanes);
  }

  // Whether this lane writes what the group has once.
  bool is_first() const { return exists && part % lanes == 0; }

  // A stream of codes, the first in the lowest bits; and of the group sum |w - decoded| and sum |w|.
  void write(AffineCodes codes, uint bits, device ushort* packed, device float2* sums) const {
    packed += part * bits;
    float2 sum = 0.0f;
    uint stream = 0, filled = 0;
    UNROLL for (uint i = 0; i < kQuantized; ++i) {
      sum += float2(fabs(codes.nearest(w[i]) - w[i]), fabs(w[i]));
      stream |= uint(codes.code(w[i])) << filled;
      filled += bits;
      if (filled >= 16) {
        if (exists) *packed++ = ushort(stream);
        stream >>= 16;
        filled -= 16;
      }
    }
    sum = sum_of_lanes(sum, lanes);
    if (is_first()) sums[part / lanes] = sum;
  }
};

// MLX's rule for the ends of a range.
inline Line line_of_range(float low, float high, float largest) {
  const bool low_is_edge = fabs(low) > fabs(high);
  const float positive = max((high - low) / largest, 1e-7f), edge = low_is_edge ? low : high;
  const float scale = low_is_edge ? positive : -positive, steps = rint(edge / scale);
  if (steps == 0.0f) return {scale, 0.0f};
  return {edge / steps, edge};
}

// Weighted least squares of a line for the codes of a group, in steps of its range: t = (w - middle) / step
// is scale * code + bias, for codes around zero.
struct Fit {
  float t[kQuantized];
  float middle, step, half_codes;
  float inverse, mean, variance;  // 1 / sum k, and of t

  struct Found {
    Line line;
    float error;
  };

  Fit(thread const GroupPart& group, float low, float high, uint bits) : half_codes(float(1u << (bits - 1))) {
    middle = (low + high) / 2.0f;
    step = max((high - low) / (2.0f * half_codes - 1.0f), FLT_MIN);
    const float inverse_step = 1.0f / step;
    float4 sums = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; ++i) {
      t[i] = (group.w[i] - middle) * inverse_step;
      const float kt = group.k[i] * t[i];
      sums += float4(group.k[i], kt, kt * t[i], 0.0f);
    }
    sums = sum_of_lanes(sums, group.lanes);
    inverse = sums.x > 0.0f ? 1.0f / sums.x : 0.0f;
    mean = sums.y * inverse;
    variance = sums.z - sums.y * mean;
  }

  // For the codes that are nearest on a line the best line, and its error: NaN for codes that are all alike.
  Found turn(thread const GroupPart& group, Line line) const {
    const float inverse_scale = 1.0f / line.scale, shift = line.bias * inverse_scale;
    float first = 0.0f, second = 0.0f, mixed = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; ++i) {
      const float c = clamp(rint(t[i] * inverse_scale - shift), -half_codes, half_codes - 1.0f);
      const float kc = group.k[i] * c;
      first += kc;
      second = fma(kc, c, second);
      mixed = fma(kc, t[i], mixed);
    }
    const float4 sums = sum_of_lanes(float4(first, second, mixed, 0.0f), group.lanes);
    const float mean_code = sums.x * inverse;
    const float of_codes = max(sums.y - sums.x * mean_code, kSmallest[0] * sums.y);
    const float covariance = sums.z - sums.x * mean, scale = covariance / of_codes;
    return {{scale, mean - scale * mean_code}, variance - scale * covariance};
  }

  // The best line of all moves, for codes from zero on.
  template <typename T>
  Line search(thread const GroupPart& group, uint many) const {
    const float one = 0.5f / half_codes, start = 1.0f - kStart[many] * one;
    Found best = turn(group, {start, start / 2.0f});
    for (uint move = 0; move < kMoves; ++move) {
      const Line line = {(1.0f + kMove[many][move][0] * one) * best.line.scale,
                         best.line.bias + kMove[many][move][1] * best.line.scale};
      const Found found = turn(group, line);
      if (found.error < best.error) best = found;
    }
    const float scale = float(T(best.line.scale * step));
    return {scale, best.line.bias * step + middle - half_codes * scale};
  }
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kQuantizeThreads)]] void quantize_affine(
    device const T* weight [[buffer(0)]], device const float* importance [[buffer(1)]],
    device ushort* packed [[buffer(2)]], device T* scales [[buffer(3)]], device T* biases [[buffer(4)]],
    device float2* sums [[buffer(5)]], constant QuantizeParams& params [[buffer(6)]],
    uint2 position [[thread_position_in_grid]]) {
  const GroupPart group(weight, importance, params, position);
  float low = group.w[0], high = low;
  UNROLL for (uint i = 1; i < kQuantized; ++i) {
    low = min(low, group.w[i]);
    high = max(high, group.w[i]);
  }
  low = -max_of_lanes(-low, group.lanes);
  high = max_of_lanes(high, group.lanes);
  const float largest = float((1u << params.bits) - 1);
  const Line line = Fit(group, low, high, params.bits).template search<T>(group, params.bits > 4 ? 1 : 0);
  AffineCodes best = AffineCodes::of<T>(line_of_range(low, high, largest), largest);
  const AffineCodes ours = AffineCodes::of<T>(line, largest);
  const bool is_better = group.error_of(ours) < group.error_of(best);  // all lanes take part in sums
  const bool is_near = group.farthest_of(ours) <= max(fabs(low), fabs(high));
  if (is_better && is_near) best = ours;
  group.write(best, params.bits, packed, sums);
  if (!group.is_first()) return;
  scales[group.part / group.lanes] = T(best.line.scale);
  biases[group.part / group.lanes] = T(best.line.bias);
}
