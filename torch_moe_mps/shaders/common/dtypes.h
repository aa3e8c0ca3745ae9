// An element of a tensor whose dtype is a run-time parameter. All threads take the same branch; a template
// parameter in its place would multiply the number of kernels.
#pragma once
#include "common.h"

inline float float_of_bits(ushort bits, uint dtype) {
  return dtype == DTYPE_HALF ? float(as_type<half>(bits)) : as_type<float>(uint(bits) << 16);
}

inline float load_one(device const uchar* source, uint dtype, ulong index) {
  if (dtype == DTYPE_FLOAT) return reinterpret_cast<device const float*>(source)[index];
  return float_of_bits(reinterpret_cast<device const ushort*>(source)[index], dtype);
}
