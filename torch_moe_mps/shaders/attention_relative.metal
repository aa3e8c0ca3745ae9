// Attention with a bias of relative positions.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/relative.h"

#ifdef MOE_WEIGHTS
typedef Relative<MOE_WEIGHTS> Cache;
#else
typedef Relative<DenseCache<MOE_DTYPE> > Cache;
#endif

INSTANTIATE_ATTENTION("attention_relative")
