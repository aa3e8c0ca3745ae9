// The kernels for weights in the format MOE_WEIGHTS: experts, linear layers, embeddings.
#include "matmul/embedding.h"
#include "matmul/heads.h"
#include "matmul/kernels.h"
#include "matmul/transposed.h"

INSTANTIATE_MATMULS(MOE_WEIGHTS)
#ifdef MOE_NORMS_APART
constant constexpr bool kNorms = false;
#else
constant constexpr bool kNorms = true;
#endif
INSTANTIATE("matmul_rows_chosen8", matmul_rows_chosen<Weights, kSingleRows, 8, kNorms, MOE_DTYPE>)
INSTANTIATE("matmul_rows_chosen16", matmul_rows_chosen<Weights, kSingleRows, 16, kNorms, MOE_DTYPE>)
#ifdef MOE_WIDE_NORMS
INSTANTIATE("matmul_rows_chosen8_wide", matmul_rows_chosen<Weights, kSingleRows, 8, true, float>)
INSTANTIATE("matmul_rows_chosen16_wide", matmul_rows_chosen<Weights, kSingleRows, 16, true, float>)
#endif
INSTANTIATE("gemm16_split", gemm<Weights, kSplitTilePairs / 8, true>)
INSTANTIATE("gemm32_split", gemm<Weights, kTilePairs / 8, true>)
INSTANTIATE("embedding_rows", embedding_rows<Weights>)
INSTANTIATE("gemm_transposed", gemm_transposed<Weights>)
INSTANTIATE_HEADS()
