#include "combine.h"
#include "expert_activation.h"

INSTANTIATE("silu_mul_stacked", silu_mul_stacked<MOE_DTYPE>)
INSTANTIATE("weighted_sum", weighted_sum_rows<MOE_DTYPE>)
INSTANTIATE("weighted_sum_norm", weighted_sum_norm_rows<MOE_DTYPE>)
INSTANTIATE("weighted_sum_backward", weighted_sum_backward<MOE_DTYPE>)
INSTANTIATE("expert_activation", expert_activation<MOE_DTYPE>)
INSTANTIATE("expert_activation_backward", expert_activation_backward<MOE_DTYPE>)
