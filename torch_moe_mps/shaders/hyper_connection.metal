#include "hyper_connection.h"

INSTANTIATE("hyper_update", hyper_update<MOE_DTYPE>)
INSTANTIATE("hyper_products", hyper_products<MOE_DTYPE, 1>)
INSTANTIATE("hyper_products_of_tokens", hyper_products<MOE_DTYPE, kHyperTokens>)
INSTANTIATE("hyper_mix", hyper_mix<MOE_DTYPE>)
