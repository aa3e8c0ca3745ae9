#include "gated_delta.h"

INSTANTIATE("causal_conv1d_update", conv_channels<MOE_DTYPE>)
INSTANTIATE("gated_delta_rule", delta_columns<MOE_DTYPE>)
