// The experts' kernels for dense weights.
#include "matmul/down_few.h"
#include "matmul/formats/dense.h"
#include "matmul/heads.h"
#include "matmul/normed.h"
#include "matmul/outer.h"
#include "matmul/prompts.h"
#include "matmul/rows_few.h"

typedef Dense<MOE_DTYPE> Weights;
INSTANTIATE("matmul_rows", matmul_rows<Weights, kSingleRows>)
INSTANTIATE("expert_down", expert_down<Weights, kSingleRows>)
INSTANTIATE_NORMED()
INSTANTIATE("matmul_rows_few", matmul_rows_few<Weights, false>)
INSTANTIATE("matmul_rows_few_split", matmul_rows_few<Weights, true>)
INSTANTIATE("expert_down_few", expert_down_few<Weights>)
INSTANTIATE_PROMPTS()
INSTANTIATE_HEADS()
INSTANTIATE("expert_outer", expert_outer<MOE_DTYPE>)
