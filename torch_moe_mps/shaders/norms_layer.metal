#include "norms.h"

INSTANTIATE("layer_norm", norm_rows<MOE_DTYPE, JOIN_NONE, true>)
INSTANTIATE("residual_layer_norm", norm_rows<MOE_DTYPE, JOIN_SUM, true>)
