// Attention over the keys that indices select.
#include "attention/block.h"

#ifdef MOE_WEIGHTS
typedef Selected<MOE_WEIGHTS> Cache;
#else
typedef Selected<DenseCache<MOE_DTYPE> > Cache;
#endif

INSTANTIATE_ATTENTION("attention_selected")
