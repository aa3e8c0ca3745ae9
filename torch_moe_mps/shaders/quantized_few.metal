// The kernels of a few tokens for weights in the format MOE_WEIGHTS.
#include "matmul/down_few.h"
#include "matmul/rows_few.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE("matmul_rows_few", matmul_rows_few<Weights, false>)
INSTANTIATE("matmul_rows_few_split", matmul_rows_few<Weights, true>)
INSTANTIATE("expert_down_few", expert_down_few<Weights>)
