#include "attention.h"

#ifdef MOE_WEIGHTS
typedef MOE_WEIGHTS Cache;
#else
typedef DenseCache<MOE_DTYPE> Cache;
#endif

INSTANTIATE_ATTENTION("attention")
INSTANTIATE("attention_merge", attention_merge<MOE_DTYPE>)
#ifdef MOE_WEIGHTS
INSTANTIATE("write_cache_quantized", write_cache_quantized<MOE_DTYPE>)
#else
INSTANTIATE("attention16_512", attention_block<Whole<Cache>, 1, 8, 8, 2>)
#endif
