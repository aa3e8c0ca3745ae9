// Attention over the keys that indices select.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/selected.h"

INSTANTIATE_ATTENTION("attention_selected", attention_block, Selected<StoredCache>)
