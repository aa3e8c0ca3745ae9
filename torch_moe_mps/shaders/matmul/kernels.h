// The kernels of a few tokens' matmuls, to be instantiated for a format of weights.
#pragma once
#include "matmul/down.h"
#include "matmul/rows.h"

#ifdef MOE_NORMS_APART
#define INSTANTIATE_NORMED()
#else
#define INSTANTIATE_NORMED() \
  INSTANTIATE("matmul_rows_normed", matmul_rows_normed<Weights, kSingleRows, Weights::Element>)
#endif
#ifdef MOE_WIDE_NORMS
#define INSTANTIATE_WIDE_NORMED() \
  INSTANTIATE("matmul_rows_normed_wide", matmul_rows_normed<Weights, kSingleRows, float>)
#else
#define INSTANTIATE_WIDE_NORMED()
#endif

#define INSTANTIATE_MATMULS(...)                                       \
  typedef __VA_ARGS__ Weights;                                         \
  INSTANTIATE("matmul_rows", matmul_rows<Weights, kSingleRows>)        \
  INSTANTIATE_NORMED()                                                 \
  INSTANTIATE_WIDE_NORMED()                                            \
  INSTANTIATE("matmul_rows_few", matmul_rows_few<Weights, false>)      \
  INSTANTIATE("matmul_rows_few_split", matmul_rows_few<Weights, true>) \
  INSTANTIATE("expert_down", expert_down<Weights, kSingleRows>)        \
  INSTANTIATE("expert_down_few", expert_down_few<Weights>)
