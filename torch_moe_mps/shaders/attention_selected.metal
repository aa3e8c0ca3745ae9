// Attention over the keys that indices select.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/selected.h"

typedef Selected<StoredCache> Cache;

INSTANTIATE_ATTENTION("attention_selected")
