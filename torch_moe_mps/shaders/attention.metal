#include "attention.h"

#ifdef MOE_WEIGHTS
typedef MOE_WEIGHTS Cache;
#else
typedef DenseCache<MOE_DTYPE> Cache;
#endif

INSTANTIATE("attention8_64", attention_block<Cache, 4, 1, 8, 1>)
INSTANTIATE("attention8_128", attention_block<Cache, 2, 2, 8, 1>)
INSTANTIATE("attention8_256", attention_block<Cache, 1, 4, 8, 1>)
INSTANTIATE("attention8_512", attention_block<Cache, 1, 8, 8, 1>)
INSTANTIATE("attention16_64", attention_block<Cache, 2, 2, 4, 2>)
INSTANTIATE("attention16_128", attention_block<Cache, 1, 4, 4, 2>)
INSTANTIATE("attention16_256", attention_block<Cache, 1, 8, 4, 2>)
INSTANTIATE("attention_merge", attention_merge<MOE_DTYPE>)
#ifdef MOE_WEIGHTS
INSTANTIATE("write_cache_quantized", write_cache_quantized<MOE_DTYPE>)
#endif
