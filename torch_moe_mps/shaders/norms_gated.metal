#include "norms.h"

INSTANTIATE("rms_norm_gated", norm_rows<MOE_DTYPE, JOIN_GATE, false>)
