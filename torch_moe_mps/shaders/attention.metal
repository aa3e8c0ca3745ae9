// Attention to all keys that a token may see.
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "attention/whole.h"

// 1 for float: the host launches no kernel of 16 queries of values over 256 in 32 bits.
#define IS_FLOAT_float 1
#define IS_FLOAT_(type) IS_FLOAT_##type
#define IS_FLOAT(type) IS_FLOAT_(type)

INSTANTIATE_ATTENTION("attention", attention_block, StoredCache)
#if MOE_WIDTH == 512 && !defined(MOE_WEIGHTS) && !IS_FLOAT(MOE_DTYPE)
INSTANTIATE("attention16_512", attention_block<Whole<StoredCache>, 1, 8, 8, 2>)
#endif
