// Attention over the keys that indices select.
#include "attention/block.h"
#include "attention/selected.h"
#include "attention/stored_cache.h"

INSTANTIATE_ATTENTION("attention_selected", attention_block, Selected<StoredCache>)
