#include "expert_columns.h"
#include "expert_decode.h"
#include "expert_gemm.h"

#define KERNEL(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define DENSE(T, suffix)                                                               \
  KERNEL("expert_rows_single_" suffix, expert_rows_single<DenseWeights<T>, 4, 2>)      \
  KERNEL("expert_rows_shared_" suffix, expert_rows_shared<DenseWeights<T>>)            \
  KERNEL("expert_down_single_" suffix, expert_down_single<DenseWeights<T>, 4, 2, 512>) \
  KERNEL("expert_down_shared_" suffix, expert_down_shared<DenseWeights<T>>)            \
  KERNEL("expert_columns_single_" suffix, expert_columns_single<T>)                    \
  KERNEL("expert_down_columns_single_" suffix, expert_down_columns_single<T>)          \
  KERNEL("expert_gemm_" suffix, expert_gemm<DenseWeights<T>>)                          \
  KERNEL("expert_gemm_transposed_" suffix, expert_gemm<DenseColumns<T>>)               \
  KERNEL("expert_combine_" suffix, expert_combine<T>)

DENSE(float, "f32")
DENSE(half, "f16")
DENSE(bfloat, "bf16")
