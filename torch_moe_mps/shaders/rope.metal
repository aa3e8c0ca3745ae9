#include "rope.h"

INSTANTIATE("rope", rope_heads<MOE_DTYPE, false>)
INSTANTIATE("rope_centred", rope_heads<MOE_DTYPE, true>)
