#include "rope.h"

INSTANTIATE("rope", rope_heads<MOE_DTYPE, false>)
INSTANTIATE("index_keys", rope_heads<MOE_DTYPE, true>)
INSTANTIATE("rope_tables", rope_table_columns<MOE_DTYPE>)
