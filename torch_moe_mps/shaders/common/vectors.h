// Vectors of 4 elements, or single ones: loads, stores, and conversions to float and back.
#pragma once
#include "common.h"

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
