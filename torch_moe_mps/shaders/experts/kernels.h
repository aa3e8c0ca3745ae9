// The experts' kernels, to be instantiated for a format of weights.
#pragma once
#include "experts/down.h"
#include "experts/gemm.h"
#include "experts/rows.h"

#define INSTANTIATE_EXPERTS(...)                                \
  typedef __VA_ARGS__ Weights;                                  \
  INSTANTIATE("expert_rows", expert_rows<Weights, kSingleRows>) \
  INSTANTIATE("expert_rows_few", expert_rows_few<Weights>)      \
  INSTANTIATE("expert_down", expert_down<Weights, kSingleRows>) \
  INSTANTIATE("expert_down_few", expert_down_few<Weights>)      \
  INSTANTIATE("expert_gemm8", expert_gemm<Weights, 1>)          \
  INSTANTIATE("expert_gemm32", expert_gemm<Weights, kTilePairs / 8>)
