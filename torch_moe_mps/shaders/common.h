// What every shader of the package uses: vectors of 4, dtype switches, reductions over a threadgroup.
#pragma once
#include <metal_stdlib>

#include "geometry.h"
#include "params/common.h"

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

// A kernel template with its arguments, under a name for the host. The host compiles a file for one dtype at
// a time, MOE_DTYPE, and for one format of weights, MOE_WEIGHTS; MOE_SUFFIX names them.
#define INSTANTIATE(name, ...) \
  template[[host_name(name MOE_SUFFIX)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// Threadgroup memory for one value of each of up to 32 simdgroups.
constant constexpr uint kMaxSimdgroups = 32;

// N consecutive elements: a vector if rows start on a multiple of 4 elements (loads of 8 or 16 bytes), else
// one element. Kernels load as much as they can before they widen it to float: a conversion next to a load
// makes the thread wait for that load before it issues the next (bfloat norms: 2650 instead of 3550 GB/s on
// an H200).
template <typename T, int N>
struct VectorOf {
  typedef vec<T, N> type;
};
template <typename T>
struct VectorOf<T, 1> {
  typedef T type;
};
template <typename T, int N>
using Vector = typename VectorOf<T, N>::type;
template <int N>
using Floats = Vector<float, N>;

inline float widen(float x) {
  return x;
}
inline float widen(half x) {
  return float(x);
}
inline float widen(bfloat x) {
  return float(x);
}
inline float4 widen(float4 x) {
  return x;
}
inline float4 widen(half4 x) {
  return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}
inline float4 widen(bfloat4 x) {
  return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}

template <typename T>
inline T narrow(float x) {
  return T(x);
}
template <typename T>
inline vec<T, 4> narrow(float4 x) {
  return vec<T, 4>(T(x[0]), T(x[1]), T(x[2]), T(x[3]));
}

template <int N, typename T>
inline Vector<T, N> load(device const T* source) {
  return *reinterpret_cast<device const Vector<T, N>*>(source);
}

template <int N, typename T>
inline void store_raw(device T* target, Vector<T, N> x) {
  *reinterpret_cast<device Vector<T, N>*>(target) = x;
}

template <typename T>
inline void store(device T* target, float x) {
  *target = T(x);
}
template <typename T>
inline void store(device T* target, float4 x) {
  *reinterpret_cast<device vec<T, 4>*>(target) = narrow<T>(x);
}

// N floats that kernels use one at a time.
template <int N>
struct Pack {
  float v[N];
};

template <int kWords>
struct Words {
  uint v[kWords];
};

// Loads of 16 or 8 bytes where the number of words allows them: `source` is a multiple of that.
template <int kWords>
inline Words<kWords> load_words(device const uint* source) {
  Words<kWords> words;
  if constexpr (kWords % 4 == 0) {
    UNROLL for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = reinterpret_cast<device const uint4*>(source)[i];
      UNROLL for (int j = 0; j < 4; ++j) words.v[4 * i + j] = four[j];
    }
  } else if constexpr (kWords % 2 == 0) {
    UNROLL for (int i = 0; i < kWords / 2; ++i) {
      const uint2 two = reinterpret_cast<device const uint2*>(source)[i];
      words.v[2 * i] = two.x;
      words.v[2 * i + 1] = two.y;
    }
  } else {
    UNROLL for (int i = 0; i < kWords; ++i) words.v[i] = source[i];
  }
  return words;
}

// Loads from a tensor whose dtype is a run-time parameter. All threads take the same branch; a template
// parameter in its place would multiply the number of kernels.
template <int N>
struct AnyVector {
  Floats<N> wide;
  Vector<ushort, N> bits;
};

template <int N>
inline AnyVector<N> load_any_raw(device const uchar* source, uint dtype, ulong index) {
  AnyVector<N> raw;
  if (dtype == DTYPE_FLOAT) {
    raw.wide = load<N>(reinterpret_cast<device const float*>(source) + index);
  } else {
    raw.bits = load<N>(reinterpret_cast<device const ushort*>(source) + index);
  }
  return raw;
}

inline float float_of_bits(ushort bits, uint dtype) {
  return dtype == DTYPE_HALF ? float(as_type<half>(bits)) : as_type<float>(uint(bits) << 16);
}
inline float4 float_of_bits(ushort4 bits, uint dtype) {
  if (dtype == DTYPE_HALF) return widen(as_type<half4>(bits));
  return as_type<float4>(uint4(bits) << 16);
}

template <int N>
inline Floats<N> widen(AnyVector<N> raw, uint dtype) {
  return dtype == DTYPE_FLOAT ? raw.wide : float_of_bits(raw.bits, dtype);
}

template <int N>
inline Floats<N> load_any(device const uchar* source, uint dtype, ulong index) {
  return widen<N>(load_any_raw<N>(source, dtype, index), dtype);
}

inline float load_one(device const uchar* source, uint dtype, ulong index) {
  if (dtype == DTYPE_FLOAT) return reinterpret_cast<device const float*>(source)[index];
  return float_of_bits(reinterpret_cast<device const ushort*>(source)[index], dtype);
}

// N elements in a row, from any place on.
template <int N>
inline Pack<N> load_row(device const uchar* source, uint dtype, ulong index) {
  Pack<N> values;
  if (dtype == DTYPE_FLOAT) {
    device const float* row = reinterpret_cast<device const float*>(source) + index;
    UNROLL for (int i = 0; i < N; ++i) values.v[i] = row[i];
  } else {
    device const ushort* row = reinterpret_cast<device const ushort*>(source) + index;
    UNROLL for (int i = 0; i < N; ++i) values.v[i] = float_of_bits(row[i], dtype);
  }
  return values;
}

template <typename T>
inline void store_bits(device ushort* target, float x) {
  *target = as_type<ushort>(T(x));
}
template <typename T>
inline void store_bits(device ushort* target, float4 x) {
  *reinterpret_cast<device ushort4*>(target) = as_type<ushort4>(narrow<T>(x));
}

// Stores to a tensor whose dtype is a run-time parameter. A kernel may load from it, too, as bits: memory has
// one type.
template <typename V>
inline void store_any(device uchar* target, uint dtype, ulong index, V x) {
  if (dtype == DTYPE_FLOAT) {
    store(reinterpret_cast<device float*>(target) + index, x);
  } else if (dtype == DTYPE_HALF) {
    store_bits<half>(reinterpret_cast<device ushort*>(target) + index, x);
  } else {
    store_bits<bfloat>(reinterpret_cast<device ushort*>(target) + index, x);
  }
}

inline float sum_of(float x) {
  return x;
}
inline float sum_of(float4 x) {
  return (x.x + x.y) + (x.z + x.w);
}
inline float sum_of_squares(float x) {
  return x * x;
}
inline float sum_of_squares(float4 x) {
  return x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
}

// sum + a * b, summed one element after the other.
inline float add_dot(float sum, float a, float b) {
  return fma(a, b, sum);
}
inline float add_dot(float sum, float4 a, float4 b) {
  UNROLL for (int i = 0; i < 4; ++i) sum = fma(a[i], b[i], sum);
  return sum;
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}
inline float4 sigmoid(float4 x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

template <typename V>
inline V silu(V x) {
  return x * sigmoid(x);
}

// log(1 + exp(x)) without overflow, and without log1p, which Metal lacks: y - (u - 1) is what the rounding of
// u = 1 + y lost. A part of log1p(y) up to 2^-24 / u of it is wrong for the missing division by u.
inline float softplus(float x) {
  const float y = precise::exp(-fabs(x)), u = 1.0f + y;
  return max(x, 0.0f) + (precise::log(u) + (y - (u - 1.0f)));
}

// The same with logarithms and powers of 2: log2(1 + exp2(x)).
inline float softplus_in_octaves(float x) {
  const float y = precise::exp2(-fabs(x)), u = 1.0f + y;
  return max(x, 0.0f) + fma(y - (u - 1.0f), M_LOG2E_F, precise::log2(u));
}

// What a token's shared expert is multiplied by.
inline float factor_of_shared(device const uchar* shared_gate, ulong token, ExpertSumParams params) {
  if (params.has_gate == 0) return 1.0f;
  const float gate = load_one(shared_gate, params.gate_dtype, token);
  return params.gate_is_logit != 0 ? sigmoid(gate) : gate;
}

// The lanes for which `predicate` holds, as bits.
inline uint ballot(bool predicate) {
  return static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(predicate)));
}

// A lane's place in a simdgroup matrix of 8x8. Metal leaves it open; it is the same on all Apple GPUs up to
// now.
struct MatrixPlace {
  uint row;
  uint quarter;  // the lane's elements are in columns 2 * quarter and 2 * quarter + 1

  MatrixPlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};

// The sum of `value` over the threadgroup, in every thread. `partials` must not be in use by an earlier
// reduction.
inline float threadgroup_sum(float value, threadgroup float* partials, uint lane, uint simdgroup,
                             uint simdgroups) {
  const float sum = simd_sum(value);
  if (lane == 0) partials[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? partials[lane] : 0.0f);
}
