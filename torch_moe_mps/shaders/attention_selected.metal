// Attention over the keys that indices select.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/selected.h"

#ifdef MOE_WEIGHTS
typedef Selected<MOE_WEIGHTS> Cache;
#else
typedef Selected<DenseCache<MOE_DTYPE> > Cache;
#endif

INSTANTIATE_ATTENTION("attention_selected")
