// MLX's affine formats.
#pragma once
#include "matmul/formats/typed_scales.h"

template <typename T, int kBits, int kGroup>
using Affine = Integers<T, kBits, TypedScales<T, kGroup>>;
