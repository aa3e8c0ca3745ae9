// Scales of MLX's affine formats and of ggml's blocks of 32 values.
#pragma once
#include "matmul/formats/integers.h"

// A scale in T for each group, and without an offset a bias.
template <typename T, int kGroup_, int kOffset_ = 0>
struct TypedScales {
  static constant constexpr int kGroup = kGroup_, kUnit = kGroup_, kPlaceBytes = 0, kOffset = kOffset_;
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
    if constexpr (kOffset != 0) {
      return {scales[unit + column / kUnit], T(0.0f)};
    } else {
      return {scales[unit + column / kUnit], biases[unit + column / kUnit]};
    }
  }
  template <bool>
  static ScaleAndBias of(Loaded loaded, int) {
    return {float(loaded.scale), float(loaded.bias)};
  }
};

// A half for each group, which codes of 0 and 1 are times -1 and 1.
template <int kGroup_>
struct SignScales {
  static constant constexpr int kGroup = kGroup_, kUnit = kGroup_, kPlaceBytes = 0, kOffset = 0;
  struct Loaded {
    half scale;
  };

  device const half* scales;

  SignScales(device const uchar* scales_, device const uchar*, ulong first_unit)
      : scales(reinterpret_cast<device const half*>(scales_) + first_unit) {}

  template <int>
  Loaded load(uint unit, uint column) const {
    return {scales[unit + column / kUnit]};
  }
  template <bool>
  static ScaleAndBias of(Loaded loaded, int) {
    return {2.0f * float(loaded.scale), -float(loaded.scale)};
  }
};
