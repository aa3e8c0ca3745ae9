#include "attention/write_cache.h"

INSTANTIATE("write_cache_quantized", write_cache_quantized<MOE_DTYPE>)
