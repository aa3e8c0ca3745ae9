#include "expert_decode.h"
#include "expert_gemm.h"

#define KERNEL(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// A lane of the decode kernels takes 16 bytes of a row at a time, a thread of the GEMM 16 values.
#define FORMAT(format, suffix, decode, gemm)                                        \
  KERNEL("expert_rows_single_" format "_" suffix, expert_rows_single<decode, 4, 1>) \
  KERNEL("expert_rows_shared_" format "_" suffix, expert_rows_shared<decode>)       \
  KERNEL("expert_down_single_" format "_" suffix, expert_down_single<decode, 4, 1>) \
  KERNEL("expert_down_shared_" format "_" suffix, expert_down_shared<decode>)       \
  KERNEL("expert_gemm_" format "_" suffix, expert_gemm<gemm>)

#define QUANTIZED(T, suffix)                              \
  typedef AffineWeights<T, 4, 4> Int4Decode_##T;          \
  typedef AffineWeights<T, 4, 2> Int4Gemm_##T;            \
  typedef AffineWeights<T, 8, 2> Int8_##T;                \
  typedef Mxfp4Weights<T, 4> Mxfp4Decode_##T;             \
  typedef Mxfp4Weights<T, 2> Mxfp4Gemm_##T;               \
  FORMAT("affine4", suffix, Int4Decode_##T, Int4Gemm_##T) \
  FORMAT("affine8", suffix, Int8_##T, Int8_##T)           \
  FORMAT("mxfp4", suffix, Mxfp4Decode_##T, Mxfp4Gemm_##T)

QUANTIZED(float, "f32")
QUANTIZED(half, "f16")
QUANTIZED(bfloat, "bf16")
