// Attention to tiles of 4 and 2 bits.
#include "attention/tiles.h"

INSTANTIATE_TILES(MOE_DTYPE, MOE_WEIGHTS)
