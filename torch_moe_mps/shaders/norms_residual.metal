#include "norms.h"

INSTANTIATE("norm_add", norm_rows<MOE_DTYPE, JOIN_NORM, false>)
INSTANTIATE("residual_norm", norm_rows<MOE_DTYPE, JOIN_SUM, false>)
