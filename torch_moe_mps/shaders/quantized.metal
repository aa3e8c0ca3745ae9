// The kernels for weights in the format MOE_WEIGHTS: experts, linear layers, embeddings.
#include "matmul/embedding.h"
#include "matmul/kernels.h"

INSTANTIATE_MATMULS(MOE_WEIGHTS)
INSTANTIATE("embedding_rows", embedding_rows<Weights>)
