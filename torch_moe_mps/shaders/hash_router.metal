#include "hash_router.h"

INSTANTIATE("normed_hash_route", hash_route<MOE_DTYPE, true>)
INSTANTIATE("hash_route", hash_route<MOE_DTYPE, false>)
