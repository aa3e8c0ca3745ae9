#include "router_logits.h"

INSTANTIATE("normed_logits_few", router_logits_few<MOE_DTYPE, true, kLogitsFewExperts>)
INSTANTIATE("normed_logits_many", router_logits<MOE_DTYPE, true, kLogitsExperts, kLogitsTokens>)
INSTANTIATE("logits_few", router_logits_few<MOE_DTYPE, false, kLogitsFewExperts>)
INSTANTIATE("logits_many", router_logits<MOE_DTYPE, false, kLogitsExperts, kLogitsTokens>)
