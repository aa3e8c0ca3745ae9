// The kernels of one token's matmuls with a norm or a router in front, for weights in the format MOE_WEIGHTS.
#include "matmul/chosen.h"
#include "matmul/normed.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE_NORMED()
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
