#include "norms.h"

INSTANTIATE("rms_norm", norm_rows<MOE_DTYPE, JOIN_NONE, false>)
