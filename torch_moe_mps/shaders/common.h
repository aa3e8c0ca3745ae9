// What every shader of the package uses: vectors of 4, dtype switches, reductions over a threadgroup.
#pragma once
#include <metal_stdlib>

#include "params.h"

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr uint kSimdWidth = 32;
// Threadgroup memory for one value of each of up to 32 simdgroups.
constant constexpr uint kMaxSimdgroups = 32;

// N consecutive elements, widened to float. N is 4 where rows start on a multiple of 4 elements (loads of 8 or 16 bytes), else 1.
template <int N>
struct Pack {
  float v[N];
};

template <int N, typename T>
inline Pack<N> load_pack(device const T* source) {
  Pack<N> pack;
  if constexpr (N == 4) {
    const vec<T, 4> raw = *reinterpret_cast<device const vec<T, 4>*>(source);
    UNROLL for (int i = 0; i < 4; ++i) pack.v[i] = float(raw[i]);
  } else {
    UNROLL for (int i = 0; i < N; ++i) pack.v[i] = float(source[i]);
  }
  return pack;
}

template <int N, typename T>
inline void store_pack(device T* target, Pack<N> pack) {
  if constexpr (N == 4) {
    vec<T, 4> raw;
    UNROLL for (int i = 0; i < 4; ++i) raw[i] = T(pack.v[i]);
    *reinterpret_cast<device vec<T, 4>*>(target) = raw;
  } else {
    UNROLL for (int i = 0; i < N; ++i) target[i] = T(pack.v[i]);
  }
}

// The same for a tensor whose dtype is a run-time parameter. The branch is uniform; a template on it would multiply the kernels.
template <int N>
inline Pack<N> load_any(device const uchar* source, uint dtype, ulong index) {
  if (dtype == DTYPE_FLOAT) return load_pack<N>(reinterpret_cast<device const float*>(source) + index);
  if (dtype == DTYPE_HALF) return load_pack<N>(reinterpret_cast<device const half*>(source) + index);
  return load_pack<N>(reinterpret_cast<device const bfloat*>(source) + index);
}

inline float load_one(device const uchar* source, uint dtype, ulong index) {
  return load_any<1>(source, dtype, index).v[0];
}

template <int N>
inline float sum_of_squares(Pack<N> pack) {
  float sum = 0.0f;
  UNROLL for (int i = 0; i < N; ++i) sum += pack.v[i] * pack.v[i];
  return sum;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// The lanes for which `predicate` holds, as bits.
inline uint ballot(bool predicate) {
  return static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(predicate)));
}

// The sum of `value` over the threadgroup, in every thread. `partials` must not be in use by an earlier reduction.
inline float threadgroup_sum(float value, threadgroup float* partials, uint lane, uint simdgroup, uint simdgroups) {
  const float sum = simd_sum(value);
  if (lane == 0) partials[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? partials[lane] : 0.0f);
}
