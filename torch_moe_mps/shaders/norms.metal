#include "norms.h"

INSTANTIATE("norm_add", norm_rows<MOE_DTYPE, false>)
INSTANTIATE("residual_norm", norm_rows<MOE_DTYPE, true>)
