// The experts' kernels for dense weights.
#include "matmul/formats/dense.h"
#include "matmul/heads.h"
#include "matmul/kernels.h"

INSTANTIATE_MATMULS(Dense<MOE_DTYPE>)
INSTANTIATE_HEADS()
