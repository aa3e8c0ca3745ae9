#include "pointwise.h"

INSTANTIATE("pointwise", pointwise<MOE_DTYPE>)
