// The kernels of one token for weights in the format MOE_WEIGHTS: experts, linear layers, embeddings.
#include "matmul/down.h"
#include "matmul/embedding.h"
#include "matmul/rows.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE("matmul_rows", matmul_rows<Weights, kSingleRows>)
INSTANTIATE("expert_down", expert_down<Weights, kSingleRows>)
INSTANTIATE("embedding_rows", embedding_rows<Weights>)
