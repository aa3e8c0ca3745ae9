#include "linear_attention.h"

#define LINEAR_ATTENTION(rows, lanes)                                            \
  INSTANTIATE("plain_scan" rows, linear_attention<MOE_DTYPE, lanes, SCAN_PLAIN>) \
  INSTANTIATE("delta_scan" rows, linear_attention<MOE_DTYPE, lanes, SCAN_DELTA>) \
  INSTANTIATE("channel_scan" rows, linear_attention<MOE_DTYPE, lanes, SCAN_CHANNELS>)

INSTANTIATE("causal_conv1d_update", conv_channels<MOE_DTYPE>)
LINEAR_ATTENTION("64", 4)
LINEAR_ATTENTION("128", 8)
LINEAR_ATTENTION("256", 16)
INSTANTIATE("selective_scan", selective_scan<MOE_DTYPE>)
