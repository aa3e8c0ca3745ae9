// What a library's keys and values are stored as.
#pragma once
#include "attention/dense_cache.h"

#ifdef MOE_WEIGHTS
typedef MOE_WEIGHTS StoredCache;
#else
typedef DenseCache<MOE_DTYPE> StoredCache;
#endif
