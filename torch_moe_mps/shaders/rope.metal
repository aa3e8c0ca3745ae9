#include "rope.h"

INSTANTIATE("rope", rope_heads<MOE_DTYPE, false>)
INSTANTIATE("rope_centred", rope_heads<MOE_DTYPE, true>)
INSTANTIATE("rope_tables", rope_table_columns<MOE_DTYPE>)
