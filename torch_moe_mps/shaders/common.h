// What every shader of the package uses: vectors of 4, dtype switches, reductions over a threadgroup.
#pragma once
#include <metal_stdlib>

#include "geometry.h"
#include "params.h"

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

// A kernel template with its arguments, under a name for the host. The host compiles a file for one dtype at
// a time, MOE_DTYPE, and for one format of weights, MOE_WEIGHTS; MOE_SUFFIX names them.
#define INSTANTIATE(name, ...) \
  template[[host_name(name MOE_SUFFIX)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// Threadgroup memory for one value of each of up to 32 simdgroups.
constant constexpr uint kMaxSimdgroups = 32;

// N consecutive elements. N is 4 where rows start on a multiple of 4 elements (loads of 8 or 16 bytes),
// else 1. Raw holds them as they lie in memory: kernels first load all that they can and widen later, because
// a conversion next to a load makes the thread wait for that load before it issues the next (bfloat norms:
// 2650 instead of 3550 GB/s on an H200).
template <typename T, int N>
struct Raw {
  T v[N];
};

template <typename T>
struct Raw<T, 4> {
  vec<T, 4> v;
};

template <int N>
struct Pack {
  float v[N];
};

template <int N, typename T>
inline Raw<T, N> load_raw(device const T* source) {
  Raw<T, N> raw;
  if constexpr (N == 4) {
    raw.v = *reinterpret_cast<device const vec<T, 4>*>(source);
  } else {
    UNROLL for (int i = 0; i < N; ++i) raw.v[i] = source[i];
  }
  return raw;
}

template <typename T, int N>
inline Pack<N> widen(Raw<T, N> raw) {
  Pack<N> pack;
  UNROLL for (int i = 0; i < N; ++i) pack.v[i] = float(raw.v[i]);
  return pack;
}

template <typename T, int N>
inline Raw<T, N> narrow(Pack<N> pack) {
  Raw<T, N> raw;
  UNROLL for (int i = 0; i < N; ++i) raw.v[i] = T(pack.v[i]);
  return raw;
}

template <int N, typename T>
inline Pack<N> load_pack(device const T* source) {
  return widen(load_raw<N>(source));
}

template <typename T, int N>
inline void store_raw(device T* target, Raw<T, N> raw) {
  if constexpr (N == 4) {
    *reinterpret_cast<device vec<T, 4>*>(target) = raw.v;
  } else {
    UNROLL for (int i = 0; i < N; ++i) target[i] = raw.v[i];
  }
}

template <int N, typename T>
inline void store_pack(device T* target, Pack<N> pack) {
  store_raw(target, narrow<T>(pack));
}

// Loads from a tensor whose dtype is a run-time parameter. All threads take the same branch; a template
// parameter in its place would multiply the number of kernels.
template <int N>
struct AnyRaw {
  Raw<float, N> wide;
  Raw<ushort, N> narrow;
};

template <int N>
inline AnyRaw<N> load_any_raw(device const uchar* source, uint dtype, ulong index) {
  AnyRaw<N> raw;
  if (dtype == DTYPE_FLOAT) {
    raw.wide = load_raw<N>(reinterpret_cast<device const float*>(source) + index);
  } else {
    raw.narrow = load_raw<N>(reinterpret_cast<device const ushort*>(source) + index);
  }
  return raw;
}

template <int N>
inline Pack<N> widen(AnyRaw<N> raw, uint dtype) {
  if (dtype == DTYPE_FLOAT) return widen(raw.wide);
  Pack<N> pack;
  if (dtype == DTYPE_HALF) {
    UNROLL for (int i = 0; i < N; ++i) pack.v[i] = float(as_type<half>(ushort(raw.narrow.v[i])));
  } else {
    UNROLL for (int i = 0; i < N; ++i) pack.v[i] = as_type<float>(uint(raw.narrow.v[i]) << 16);
  }
  return pack;
}

template <int N>
inline Pack<N> load_any(device const uchar* source, uint dtype, ulong index) {
  return widen(load_any_raw<N>(source, dtype, index), dtype);
}

inline float load_one(device const uchar* source, uint dtype, ulong index) {
  if (dtype == DTYPE_FLOAT) return reinterpret_cast<device const float*>(source)[index];
  const ushort bits = reinterpret_cast<device const ushort*>(source)[index];
  return dtype == DTYPE_HALF ? float(as_type<half>(bits)) : as_type<float>(uint(bits) << 16);
}

// Stores to a tensor whose dtype is a run-time parameter.
template <int N>
inline void store_any(device uchar* target, uint dtype, ulong index, Pack<N> pack) {
  if (dtype == DTYPE_FLOAT) {
    store_pack(reinterpret_cast<device float*>(target) + index, pack);
  } else if (dtype == DTYPE_HALF) {
    store_pack(reinterpret_cast<device half*>(target) + index, pack);
  } else {
    store_pack(reinterpret_cast<device bfloat*>(target) + index, pack);
  }
}

template <int N>
inline float sum_of_squares(Pack<N> pack) {
  float sum = 0.0f;
  UNROLL for (int i = 0; i < N; ++i) sum += pack.v[i] * pack.v[i];
  return sum;
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

// The lanes for which `predicate` holds, as bits.
inline uint ballot(bool predicate) {
  return static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(predicate)));
}

// The sum of `value` over the threadgroup, in every thread. `partials` must not be in use by an earlier
// reduction.
inline float threadgroup_sum(float value, threadgroup float* partials, uint lane, uint simdgroup,
                             uint simdgroups) {
  const float sum = simd_sum(value);
  if (lane == 0) partials[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? partials[lane] : 0.0f);
}
