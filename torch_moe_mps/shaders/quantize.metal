#include "quantize.h"

INSTANTIATE("quantize_affine", quantize_affine<MOE_DTYPE>)
INSTANTIATE("quantize_mxfp4", quantize_floats<MOE_DTYPE, ToE2M1, false>)
INSTANTIATE("quantize_mxfp8", quantize_floats<MOE_DTYPE, ToE4M3, false>)
INSTANTIATE("quantize_nvfp4", quantize_floats<MOE_DTYPE, ToE2M1, true>)
