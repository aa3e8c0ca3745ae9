#include "causal_conv1d.h"

INSTANTIATE("causal_conv1d_update", conv_channels<MOE_DTYPE>)
