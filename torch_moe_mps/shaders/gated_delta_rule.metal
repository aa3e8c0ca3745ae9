#include "gated_delta_rule.h"

#define GATED_DELTA_RULE(rows, lanes)                                            \
  INSTANTIATE("plain_scan" rows, gated_delta_rule<MOE_DTYPE, lanes, SCAN_PLAIN>) \
  INSTANTIATE("delta_scan" rows, gated_delta_rule<MOE_DTYPE, lanes, SCAN_DELTA>) \
  INSTANTIATE("channel_scan" rows, gated_delta_rule<MOE_DTYPE, lanes, SCAN_CHANNELS>)

GATED_DELTA_RULE("64", 4)
GATED_DELTA_RULE("128", 8)
GATED_DELTA_RULE("256", 16)
