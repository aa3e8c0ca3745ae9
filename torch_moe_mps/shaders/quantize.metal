#include "quantize.h"

INSTANTIATE("quantize_affine", quantize_affine<MOE_DTYPE>)
