#include "norms.h"

INSTANTIATE("rms_norm", norm_rows<MOE_DTYPE, JOIN_NONE, false>)
INSTANTIATE("rms_norm_gated", norm_rows<MOE_DTYPE, JOIN_GATE, false>)
INSTANTIATE("norm_add", norm_rows<MOE_DTYPE, JOIN_NORM, false>)
INSTANTIATE("residual_norm", norm_rows<MOE_DTYPE, JOIN_SUM, false>)
INSTANTIATE("layer_norm", norm_rows<MOE_DTYPE, JOIN_NONE, true>)
INSTANTIATE("residual_layer_norm", norm_rows<MOE_DTYPE, JOIN_SUM, true>)
