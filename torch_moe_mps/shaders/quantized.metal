// The kernels of tokens for weights in the format MOE_WEIGHTS: experts, linear layers, embeddings.
#include "matmul/embedding.h"
#include "matmul/kernels.h"

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
INSTANTIATE("embedding_rows", embedding_rows<Weights>)
