// Loads of vectors from a tensor whose dtype is a run-time parameter.
#pragma once
#include "common/dtypes.h"
#include "common/vectors.h"

// Floats, or the bits of N elements of 16 bits in the first of them: both would take registers beside each
// other.
template <int N>
struct AnyVector {
  Floats<N> v;
};

inline float holding(ushort bits) {
  return as_type<float>(uint(bits));
}
inline float4 holding(ushort4 bits) {
  return float4(as_type<float2>(bits), 0.0f, 0.0f);
}
inline ushort held_in(float v) {
  return ushort(as_type<uint>(v));
}
inline ushort4 held_in(float4 v) {
  return as_type<ushort4>(v.xy);
}

template <int N>
inline AnyVector<N> load_any_raw(device const uchar* source, uint dtype, ulong index) {
  AnyVector<N> raw;
  if (dtype == DTYPE_FLOAT) {
    raw.v = load<N>(reinterpret_cast<device const float*>(source) + index);
  } else {
    raw.v = holding(load<N>(reinterpret_cast<device const ushort*>(source) + index));
  }
  return raw;
}

inline float4 float_of_bits(ushort4 bits, uint dtype) {
  if (dtype == DTYPE_HALF) return widen(as_type<half4>(bits));
  return as_type<float4>(uint4(bits) << 16);
}

template <int N>
inline Floats<N> widen(AnyVector<N> raw, uint dtype) {
  return dtype == DTYPE_FLOAT ? raw.v : float_of_bits(held_in(raw.v), dtype);
}

template <int N>
inline Floats<N> load_any(device const uchar* source, uint dtype, ulong index) {
  return widen<N>(load_any_raw<N>(source, dtype, index), dtype);
}
