#include "rope.h"

INSTANTIATE("rope", rope_heads<MOE_DTYPE, false>)
