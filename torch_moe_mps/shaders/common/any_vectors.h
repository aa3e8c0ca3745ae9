// Loads of vectors from a tensor whose dtype is a run-time parameter.
#pragma once
#include "common/dtypes.h"
#include "common/vectors.h"

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
