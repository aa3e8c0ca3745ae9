// Quantises tiles of keys and values.
#include "attention/seal.h"

INSTANTIATE("seal_tiles_2", seal_tiles<MOE_DTYPE, 2>)
INSTANTIATE("seal_tiles_4", seal_tiles<MOE_DTYPE, 4>)
