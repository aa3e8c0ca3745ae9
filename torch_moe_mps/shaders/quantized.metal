// The kernels for weights in the format MOE_WEIGHTS: experts, linear layers, embeddings.
#include "experts/embedding.h"
#include "experts/kernels.h"

INSTANTIATE_EXPERTS(MOE_WEIGHTS)
INSTANTIATE("embedding_rows", embedding_rows<Weights>)
