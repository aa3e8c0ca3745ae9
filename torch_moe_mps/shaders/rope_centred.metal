#include "rope.h"

INSTANTIATE("rope_centred", rope_heads<MOE_DTYPE, true>)
