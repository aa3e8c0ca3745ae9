#include "gate.h"
#include "router.h"

INSTANTIATE("route2", route_rows<MOE_DTYPE, 2>)
INSTANTIATE("route4", route_rows<MOE_DTYPE, 4>)
INSTANTIATE("route8", route_rows<MOE_DTYPE, 8>)
INSTANTIATE("route16", route_rows<MOE_DTYPE, 16>)
INSTANTIATE("route32", route_rows<MOE_DTYPE, 32>)
INSTANTIATE("gate_single", gate_logits<MOE_DTYPE, true, kGateSingleExperts, 1>)
INSTANTIATE("gate_many", gate_logits<MOE_DTYPE, true, kGateExperts, kGateTokens>)
INSTANTIATE("logits_single", gate_logits<MOE_DTYPE, false, kGateSingleExperts, 1>)
INSTANTIATE("logits_many", gate_logits<MOE_DTYPE, false, kGateExperts, kGateTokens>)
