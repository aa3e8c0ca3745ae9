// Codes and scales of the least weighted error that a search finds: see ops/quantize.py.
#pragma once
#include "common/vectors.h"
#include "geometry/quantize.h"
#include "params/quantize.h"
#include "quantize_moves.h"

// A code, and the value that it stands for.
struct Coded {
  uint code;
  float value;
};

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
  template <typename Codes>
  float error_of(Codes codes) const {
    float error = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; ++i) {
      const float difference = codes.nearest(w[i]) - w[i];
      error = fma(difference * difference, k[i], error);
    }
    return sum_of_lanes(error, lanes);
  }

  // The largest |w - decoded| of the group.
  template <typename Codes>
  float farthest_of(Codes codes) const {
    float farthest = 0.0f;
    UNROLL for (uint i = 0; i < kQuantized; ++i) farthest = max(farthest, fabs(codes.nearest(w[i]) - w[i]));
    return max_of_lanes(farthest, lanes);
  }

  // Whether this lane writes what the group has once.
  bool is_first() const { return exists && part % lanes == 0; }

  // A stream of codes, the first in the lowest bits; and of the group sum |w - decoded| and sum |w|.
  template <typename Codes>
  void write(Codes codes, uint bits, device ushort* packed, device float2* sums) const {
    packed += part * bits;
    float2 sum = 0.0f;
    uint stream = 0, filled = 0;
    UNROLL for (uint i = 0; i < kQuantized; ++i) {
      const Coded coded = codes.coded(w[i]);
      sum += float2(fabs(coded.value - w[i]), fabs(w[i]));
      stream |= coded.code << filled;
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

// --- affine formats

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
  Coded coded(float w) const {
    const float number = code(w);
    return {uint(number), number * line.scale + line.bias};
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

// --- formats without biases

// Numbers of few bits: kMantissa of them behind the point, and below the first power of two as far apart as
// behind it.
template <int kMantissaBits, int kFirstExponent, int kMost, bool kTiesDown>
struct SmallFloat {
  static constant constexpr int kBits = kMantissaBits == 1 ? 4 : 8;
  static constant constexpr float kLargest = float(kMost);

  // Distance to the next of the numbers near x.
  static float spacing(float x) {
    const uint power = max(as_type<uint>(x) & 0x7f800000u, uint(127 + kFirstExponent) << 23);
    return as_type<float>(power - (uint(kMantissaBits) << 23));
  }
  // The nearest number; a tie is even.
  static float nearest(float x) {
    const float step = spacing(x);
    return clamp(rint(x / step) * step, -kLargest, kLargest);
  }
  // The code of the nearest number, and the number: as MLX chooses of a tie.
  static Coded coded(float x) {
    float number = nearest(x);
    if (kTiesDown) {
      const float step = spacing(x);
      number = copysign(min(ceil(fabs(x) / step - 0.5f) * step, kLargest), x);
    }
    const float size = fabs(number);
    constexpr uint kFirst = uint(127 + kFirstExponent) << kMantissaBits, kOne = 1u << kMantissaBits;
    const float first = as_type<float>(uint(127 + kFirstExponent) << 23);
    const uint code = size < first ? uint(size / first * float(kOne))
                                   : (as_type<uint>(size) >> (23 - kMantissaBits)) - (kFirst - kOne);
    const bool negative = as_type<uint>(x) >> 31 != 0 && (!kTiesDown || code != 0);
    return {code | (negative ? 1u << (kBits - 1) : 0u), number};
  }
};
typedef SmallFloat<1, 0, 6, true> ToE2M1;
typedef SmallFloat<3, -6, 448, false> ToE4M3;

// The nearest numbers, times a scale.
template <typename Code>
struct FloatCodes {
  float scale, inverse;

  static FloatCodes of(float scale) { return {scale, scale == 0.0f ? 0.0f : 1.0f / scale}; }
  float nearest(float w) const { return Code::nearest(w * inverse) * scale; }
  Coded coded(float w) const {
    const Coded coded = Code::coded(scale == 0.0f ? 0.0f : w / scale);
    return {coded.code, coded.value * scale};
  }
};

// The smallest power of two that is at least `fit`, as a scale of e8m0. None is below the normal numbers.
inline uint covering_power(float fit) {
  const uint bits = as_type<uint>(fit);
  return fit == 0.0f ? 127 : (bits + 0x7fffffu) >> 23;
}
inline float e8m0(uint scale) {
  return as_type<float>(scale << 23);
}

// The scale, of e4m3, that is the best for the numbers that another one gives.
inline float least_squares(thread const GroupPart& group, float scale) {
  const FloatCodes<ToE2M1> codes = FloatCodes<ToE2M1>::of(scale);
  float2 sums = 0.0f;
  UNROLL for (uint i = 0; i < kQuantized; ++i) {
    const float number = ToE2M1::nearest(group.w[i] * codes.inverse), kn = group.k[i] * number;
    sums += float2(kn * group.w[i], kn * number);
  }
  sums = sum_of_lanes(sums, group.lanes);
  const float fitted = sums.x / sums.y;
  return fitted > 0.0f ? ToE4M3::nearest(fitted) : scale;
}

template <typename T, typename Code, bool kE4M3Scale>
[[kernel, max_total_threads_per_threadgroup(kQuantizeThreads)]] void quantize_floats(
    device const T* weight [[buffer(0)]], device const float* importance [[buffer(1)]],
    device ushort* packed [[buffer(2)]], device uchar* scales [[buffer(3)]],
    device float2* sums [[buffer(4)]], constant QuantizeParams& params [[buffer(5)]],
    uint2 position [[thread_position_in_grid]]) {
  const GroupPart group(weight, importance, params, position);
  float largest = 0.0f;
  UNROLL for (uint i = 0; i < kQuantized; ++i) largest = max(largest, fabs(group.w[i]));
  // MLX divides in the dtype of the weights.
  const float fit = float(T(max_of_lanes(largest, group.lanes) / Code::kLargest));
  const uint power = covering_power(fit);
  FloatCodes<Code> best = FloatCodes<Code>::of(kE4M3Scale ? ToE4M3::nearest(fit) : e8m0(power));
  float least = group.error_of(best);
  const float covering = best.scale;
  UNROLL for (uint i = 0; i < 2; ++i) {
    float scale = e8m0(uint(clamp(int(power) + kSteps[i], 1, 254)));
    if (kE4M3Scale) scale = least_squares(group, ToE4M3::nearest(covering * kFactors[i]));
    const FloatCodes<Code> other = FloatCodes<Code>::of(scale);
    const float error = group.error_of(other);
    if (error < least) {
      least = error;
      best = other;
    }
  }
  group.write(best, Code::kBits, packed, sums);
  if (!group.is_first()) return;
  scales[group.part / group.lanes] =
      uchar(kE4M3Scale ? ToE4M3::coded(best.scale).code : as_type<uint>(best.scale) >> 23);
}
