#include "attention.h"

INSTANTIATE("attention1_64", attention_chunk<MOE_DTYPE, 8, 1>)
INSTANTIATE("attention1_128", attention_chunk<MOE_DTYPE, 16, 1>)
INSTANTIATE("attention1_256", attention_chunk<MOE_DTYPE, 32, 1>)
INSTANTIATE("attention2_64", attention_chunk<MOE_DTYPE, 8, kAttentionQueries>)
INSTANTIATE("attention2_128", attention_chunk<MOE_DTYPE, 16, kAttentionQueries>)
INSTANTIATE("attention2_256", attention_chunk<MOE_DTYPE, 32, kAttentionQueries>)
INSTANTIATE("attention_merge", attention_merge<MOE_DTYPE>)
