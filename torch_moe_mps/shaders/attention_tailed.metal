// Attention over the keys of a window and those of a tail.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/tailed.h"

typedef Tailed<DenseCache<MOE_DTYPE> > Cache;

INSTANTIATE_ATTENTION("attention_tailed")
