#include "index.h"

INSTANTIATE("index_scores", index_scores<MOE_DTYPE>)
INSTANTIATE("index_block_scores", index_block_scores<MOE_DTYPE>)
INSTANTIATE("index_select", index_select<MOE_DTYPE>)
