// The experts' kernels for weights in the format MOE_WEIGHTS.
#include "experts/kernels.h"

INSTANTIATE_EXPERTS(MOE_WEIGHTS)
