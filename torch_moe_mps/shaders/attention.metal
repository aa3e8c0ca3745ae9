// Attention to all keys that a token may see.
#include "attention/block.h"
#include "attention/stored_cache.h"
#include "attention/whole.h"

// 1 for float: kernels that stage queries in 16 bits are launched for these alone.
#define IS_FLOAT_float 1
#define IS_FLOAT_(type) IS_FLOAT_##type
#define IS_FLOAT(type) IS_FLOAT_(type)

INSTANTIATE_ATTENTION("attention", attention_block, StoredCache)
#if !defined(MOE_WEIGHTS) && !IS_FLOAT(MOE_DTYPE)
#if MOE_WIDTH == 64
INSTANTIATE("attention32_64", attention_block<StoredCache, 1, 4, 2, 4, 1>)
#elif MOE_WIDTH == 128
INSTANTIATE("attention32_128", attention_block<StoredCache, 1, 8, 2, 4, 1>)
#elif MOE_WIDTH == 512
INSTANTIATE("attention16_512", attention_block<Whole<StoredCache>, 1, 8, 8, 2>)
#endif
#endif
