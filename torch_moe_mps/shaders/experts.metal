#include "expert_columns.h"
#include "expert_decode.h"
#include "expert_gemm.h"

#define DENSE(T, suffix)                                                                                  \
  INSTANTIATE_KERNEL("expert_rows_single_" suffix, expert_rows_single<DenseWeights<T>, kSingleRows>)      \
  INSTANTIATE_KERNEL("expert_rows_few_" suffix, expert_rows_few<DenseWeights<T>>)                         \
  INSTANTIATE_KERNEL("expert_down_single_" suffix, expert_down_single<DenseWeights<T>, kSingleRows, 512>) \
  INSTANTIATE_KERNEL("expert_down_few_" suffix, expert_down_few<DenseWeights<T>>)                         \
  INSTANTIATE_KERNEL("expert_columns_single_" suffix, expert_columns_single<T>)                           \
  INSTANTIATE_KERNEL("expert_down_columns_single_" suffix, expert_down_columns_single<T>)                 \
  INSTANTIATE_KERNEL("expert_gemm_" suffix, expert_gemm<DenseWeights<T>>)                                 \
  INSTANTIATE_KERNEL("expert_gemm_transposed_" suffix, expert_gemm<DenseColumns<T>>)

DENSE(float, "f32")
DENSE(half, "f16")
DENSE(bfloat, "bf16")
