// Stores to a tensor whose dtype is a run-time parameter. A kernel may load from it, too, as bits: memory has
// one type.
#pragma once
#include "common/vectors.h"

template <typename T>
inline void store_bits(device ushort* target, float x) {
  *target = as_type<ushort>(T(x));
}
template <typename T>
inline void store_bits(device ushort* target, float4 x) {
  *reinterpret_cast<device ushort4*>(target) = as_type<ushort4>(narrow<T>(x));
}

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
