// The kernels of latent attention's heads for weights in the format MOE_WEIGHTS.
#include "matmul/heads.h"

typedef MOE_WEIGHTS Weights;
INSTANTIATE_HEADS()
