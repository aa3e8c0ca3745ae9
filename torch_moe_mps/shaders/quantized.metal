#include "expert_gemm.h"
#include "expert_matrix.h"

// expert_down_single is bounded by 1024 threads, four times what is launched for 8 experts, so that few
// registers are taken and all threadgroups run at once: 6.8 instead of 7.9 us on an NVIDIA H200 (int4, 8
// experts, 768 -> 2048). A lane of the decode kernels takes 16 bytes of a row at a time, a thread of the GEMM
// 16 values.
#define FORMAT(format, suffix, single, gemm)                                                          \
  INSTANTIATE_KERNEL("expert_rows_single_" format "_" suffix, expert_rows_single<single, 4, 1>)       \
  INSTANTIATE_KERNEL("expert_down_single_" format "_" suffix, expert_down_single<single, 4, 1, 1024>) \
  INSTANTIATE_KERNEL("expert_gemm_" format "_" suffix, expert_gemm<gemm>)

#define SHARED(format, suffix, weights)                                                    \
  INSTANTIATE_KERNEL("expert_rows_shared_" format "_" suffix, expert_rows_shared<weights>) \
  INSTANTIATE_KERNEL("expert_down_shared_" format "_" suffix, expert_down_shared<weights>)

#define MATRIX(format, suffix, weights, fragments)                                                    \
  INSTANTIATE_KERNEL("expert_rows_matrix_" format "_" suffix, expert_rows_matrix<weights, fragments>) \
  INSTANTIATE_KERNEL("expert_down_matrix_" format "_" suffix, expert_down_matrix<fragments>)

#define QUANTIZED(T, suffix)                                \
  typedef AffineWeights<T, 4, 4> Int4Single_##T;            \
  typedef AffineWeights<T, 4, 4, true> Int4Shared_##T;      \
  typedef AffineFragments<T, 4> Int4Matrix_##T;             \
  typedef AffineWeights<T, 4, 2> Int4Gemm_##T;              \
  typedef AffineWeights<T, 8, 2> Int8_##T;                  \
  typedef AffineWeights<T, 8, 2, true> Int8Shared_##T;      \
  typedef AffineFragments<T, 8> Int8Matrix_##T;             \
  typedef Mxfp4Weights<T, 4> Mxfp4Decode_##T;               \
  typedef Mxfp4Weights<T, 2> Mxfp4Gemm_##T;                 \
  FORMAT("affine4", suffix, Int4Single_##T, Int4Gemm_##T)   \
  MATRIX("affine4", suffix, Int4Shared_##T, Int4Matrix_##T) \
  FORMAT("affine8", suffix, Int8_##T, Int8_##T)             \
  MATRIX("affine8", suffix, Int8Shared_##T, Int8Matrix_##T) \
  FORMAT("mxfp4", suffix, Mxfp4Decode_##T, Mxfp4Gemm_##T)   \
  SHARED("mxfp4", suffix, Mxfp4Decode_##T)

QUANTIZED(float, "f32")
QUANTIZED(half, "f16")
QUANTIZED(bfloat, "bf16")
