// MLX's affine formats.
#pragma once
#include "matmul/formats/integers.h"

// A scale and a bias in T for each group.
template <typename T, int kGroup_>
struct TypedScales {
  static constant constexpr int kGroup = kGroup_, kUnit = kGroup_, kPlaceBytes = 0, kOffset = 0;
  struct Loaded {
    T scale, bias;
  };

  device const T* scales;
  device const T* biases;

  TypedScales(device const uchar* scales_, device const uchar* biases_, ulong first_unit)
      : scales(reinterpret_cast<device const T*>(scales_) + first_unit),
        biases(reinterpret_cast<device const T*>(biases_) + first_unit) {}

  template <int>
  Loaded load(uint unit, uint column) const {
    return {scales[unit + column / kUnit], biases[unit + column / kUnit]};
  }
  template <bool>
  static ScaleAndBias of(Loaded loaded, int) {
    return {float(loaded.scale), float(loaded.bias)};
  }
};

template <typename T, int kBits, int kGroup>
using Affine = Integers<T, kBits, TypedScales<T, kGroup>>;
