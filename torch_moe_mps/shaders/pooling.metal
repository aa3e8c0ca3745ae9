#include "pooling.h"

INSTANTIATE("pool_windows", pool_windows<MOE_DTYPE>)
