// Attention over the keys of a window and those of a tail.
#include "attention/block.h"

typedef Tailed<DenseCache<MOE_DTYPE> > Cache;

INSTANTIATE_ATTENTION("attention_tailed")
