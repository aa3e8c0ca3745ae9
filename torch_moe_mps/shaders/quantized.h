// The kernels of a quantised format. Each format has a library of its own, so that Metal compiles only what a
// model uses.
#pragma once
#include "expert_down_matrix.h"
#include "expert_gemm.h"
#include "expert_rows_matrix.h"

// expert_down_single is bounded by 1024 threads, four times what is launched for 8 experts, so that few
// registers are taken and all threadgroups run at once: 6.8 instead of 7.9 us on an NVIDIA H200 (int4, 8
// experts, 768 -> 2048). Not measured on an Apple GPU. A lane of the decode kernels takes 16 bytes of a row
// at a time, a thread of the GEMM 16 values.
#define FORMAT(name, single, gemm)                                                              \
  INSTANTIATE_KERNEL("expert_rows_single_" name, expert_rows_single<single, kSingleRows>)       \
  INSTANTIATE_KERNEL("expert_down_single_" name, expert_down_single<single, kSingleRows, 1024>) \
  INSTANTIATE_KERNEL("expert_gemm_" name, expert_gemm<gemm>)

#define FEW(name, weights)                                              \
  INSTANTIATE_KERNEL("expert_rows_few_" name, expert_rows_few<weights>) \
  INSTANTIATE_KERNEL("expert_down_few_" name, expert_down_few<weights>)

// `rows` and `down` are the fragments of the first and of the second matmul.
#define MATRIX(name, weights, rows, down)                                                                \
  INSTANTIATE_KERNEL("expert_rows_matrix_" name, expert_rows_matrix<weights, rows>)                      \
  INSTANTIATE_KERNEL("expert_down_matrix_" name, expert_down_matrix<down, kMatrixDownSimdgroups, false>) \
  INSTANTIATE_KERNEL("expert_down_parts_" name, expert_down_matrix<down, kPartsSimdgroups, true>)
