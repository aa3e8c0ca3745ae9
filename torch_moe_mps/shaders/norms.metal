#include "norms.h"

INSTANTIATE("rms_norm", norm_rows<MOE_DTYPE, JOIN_NONE>)
INSTANTIATE("rms_norm_gated", norm_rows<MOE_DTYPE, JOIN_GATE>)
INSTANTIATE("norm_add", norm_rows<MOE_DTYPE, JOIN_NORM>)
INSTANTIATE("residual_norm", norm_rows<MOE_DTYPE, JOIN_SUM>)
INSTANTIATE("layer_norm", norm_rows<MOE_DTYPE, JOIN_CENTRE>)
