// Kernels for weights in the format MOE_WEIGHTS that the tuner compares with those without "_variant" in
// their names: for one token four rows a group of lanes, and experts one after another in the down
// projection; for prompts two buffers of inputs.
#include "matmul/chosen.h"
#include "matmul/down.h"
#include "matmul/gemm.h"
#include "matmul/normed.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE("matmul_rows_variant", matmul_rows<Weights, kVariantRows>)
INSTANTIATE("expert_down_variant", expert_down<Weights, kSingleRows, true>)
INSTANTIATE("gemm32_variant", gemm<Weights, kTilePairs / 8, false, kVariantBuffers>)
#ifdef MOE_NORMS_APART
INSTANTIATE("matmul_rows_chosen8_variant", matmul_rows_chosen<Weights, kVariantRows, 8, false, MOE_DTYPE>)
#else
INSTANTIATE("matmul_rows_normed_variant", matmul_rows_normed<Weights, kVariantRows, MOE_DTYPE>)
INSTANTIATE("matmul_rows_chosen8_variant", matmul_rows_chosen<Weights, kVariantRows, 8, true, MOE_DTYPE>)
#endif
#ifdef MOE_WIDE_NORMS
INSTANTIATE("matmul_rows_normed_wide_variant", matmul_rows_normed<Weights, kVariantRows, float>)
INSTANTIATE("matmul_rows_chosen8_wide_variant", matmul_rows_chosen<Weights, kVariantRows, 8, true, float>)
#endif
