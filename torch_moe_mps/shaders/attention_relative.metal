// Attention with a bias of relative positions.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/whole.h"

INSTANTIATE_ATTENTION("attention_relative", attention_block, Whole<StoredCache, true>)
