// Attention with a bias of relative positions.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/whole.h"

typedef Whole<StoredCache, true> Cache;

INSTANTIATE_ATTENTION("attention_relative")
