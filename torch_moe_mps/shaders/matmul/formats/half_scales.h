// Scales of ggml's blocks of 32 values.
#pragma once
#include "matmul/formats/integers.h"

// A half, and without an offset another one.
template <int kOffset_>
struct HalfScales {
  static constant constexpr int kGroup = 32, kUnit = 32, kPlaceBytes = 0, kOffset = kOffset_;
  struct Loaded {
    half scale, bias;
  };

  device const half* scales;
  device const half* biases;

  HalfScales(device const uchar* scales_, device const uchar* biases_, ulong first_unit)
      : scales(reinterpret_cast<device const half*>(scales_) + first_unit),
        biases(reinterpret_cast<device const half*>(biases_) + first_unit) {}

  template <int>
  Loaded load(uint unit, uint column) const {
    if constexpr (kOffset != 0) {
      return {scales[unit + column / kUnit], 0.0h};
    } else {
      return {scales[unit + column / kUnit], biases[unit + column / kUnit]};
    }
  }
  template <bool>
  static ScaleAndBias of(Loaded loaded, int) {
    return {float(loaded.scale), float(loaded.bias)};
  }
};
