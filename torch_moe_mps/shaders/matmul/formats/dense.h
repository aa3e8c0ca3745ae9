// Weights as they are.
#pragma once
#include "matmul/formats.h"

// [E, rows, inputs] in T; rows of any length.
template <typename T>
struct Dense {
  typedef T Element;
  static constant constexpr int kValues = 32 / sizeof(T), kTileValues = kValues, kPackSize = 8, kGroups = 1;
  static constant constexpr bool kAnyLength = true;

  template <int N>
  struct Chunk {
    Elements<T, N> elements;
  };
  typedef uint Row;

  device const T* matrix;
  uint inputs;
  bool vectorised;

  Dense(device const uchar* packed, device const uchar*, device const uchar*, uint expert,
        constant MatmulParams& params)
      : matrix(reinterpret_cast<device const T*>(packed) + ulong(expert) * params.rows * params.inputs),
        inputs(params.inputs),
        vectorised(params.vectorised != 0) {}

  Row row(uint number) const { return number * inputs; }
  template <int N>
  Chunk<N> load(Row row, uint column, uint left) const {
    return {load_elements<N>(matrix + (row + column), left, vectorised)};
  }

  static Pack<8> codes(Chunk<kValues> chunk, int pack) {
    Pack<8> result;
    UNROLL for (int i = 0; i < 8; ++i) result.v[i] = chunk.elements.at(8 * pack + i);
    return result;
  }
  static void add_inputs(Pack<8>, thread InputSums&) {}
  static float excess(InputSums) { return 0.0f; }
  static void add_dot(Chunk<kValues>, int, float dot, InputSums, thread float& total) { total += dot; }

  static FragmentElement place_of(int value) { return {value / 2, value % 2}; }
  static float2 values(Chunk<kTileValues> chunk, int number) {
    return float2(chunk.elements.at(2 * number), chunk.elements.at(2 * number + 1));
  }
};
