// Loads of rows from a tensor whose dtype is a run-time parameter.
#pragma once
#include "common/dtypes.h"
#include "common/packs.h"

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
