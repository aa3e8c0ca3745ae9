// Attention over the keys of a window and those of a tail.
#include "attention/block.h"
#include "attention/stored_cache.h"
#include "attention/tailed.h"

INSTANTIATE_ATTENTION("attention_tailed", attention_block, Tailed<StoredCache>)
