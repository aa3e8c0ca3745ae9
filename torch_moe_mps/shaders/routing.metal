#include "router.h"
#include "router_logits.h"

INSTANTIATE("route2", route_rows<MOE_DTYPE, 2>)
INSTANTIATE("route4", route_rows<MOE_DTYPE, 4>)
INSTANTIATE("route8", route_rows<MOE_DTYPE, 8>)
INSTANTIATE("route16", route_rows<MOE_DTYPE, 16>)
INSTANTIATE("route32", route_rows<MOE_DTYPE, 32>)
INSTANTIATE("normed_logits_few", router_logits_few<MOE_DTYPE, true, kLogitsFewExperts>)
INSTANTIATE("normed_logits_many", router_logits<MOE_DTYPE, true, kLogitsExperts, kLogitsTokens>)
INSTANTIATE("logits_few", router_logits_few<MOE_DTYPE, false, kLogitsFewExperts>)
INSTANTIATE("logits_many", router_logits<MOE_DTYPE, false, kLogitsExperts, kLogitsTokens>)
