#include "combine.h"

INSTANTIATE("silu_mul_stacked", silu_mul_stacked<MOE_DTYPE>)
INSTANTIATE("weighted_sum", weighted_sum_rows<MOE_DTYPE>)
INSTANTIATE("weighted_sum_norm", weighted_sum_norm_rows<MOE_DTYPE>)
