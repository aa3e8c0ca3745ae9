// GGUF's formats of integers.
#pragma once
#include "matmul/formats/small_scales.h"
#include "matmul/formats/typed_scales.h"

template <typename T>
using Q4_0 = Integers<T, 4, HalfScales<8>>;
template <typename T>
using Q4_1 = Integers<T, 4, HalfScales<0>>;
template <typename T>
using Q5_0 = Integers<T, 5, HalfScales<16>>;
template <typename T>
using Q5_1 = Integers<T, 5, HalfScales<0>>;
template <typename T>
using Q8_0 = Integers<T, 8, HalfScales<128>>;
template <typename T>
using Q2_K = Integers<T, 2, SmallScales<16, 4, true, 0, 0>>;
template <typename T>
using Q3_K = Integers<T, 3, SmallScales<16, 6, false, 32, 4>>;
template <typename T>
using Q4_K = Integers<T, 4, SmallScales<32, 6, true, 0, 0>>;
template <typename T>
using Q5_K = Integers<T, 5, SmallScales<32, 6, true, 0, 0>>;
template <typename T>
using Q6_K = Integers<T, 6, SmallScales<16, 8, false, 128, 32>>;
template <typename T>
using TQ2_0 = Integers<T, 2, SmallScales<32, 0, false, 0, 1>>;
