#include "rope.h"

INSTANTIATE("rope", rope_heads<MOE_DTYPE>)
INSTANTIATE("rope_tables", rope_table_columns<MOE_DTYPE>)
