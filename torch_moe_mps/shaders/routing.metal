#include "gate.h"
#include "router.h"

INSTANTIATE("route2", route_rows<MOE_DTYPE, 2>)
INSTANTIATE("route4", route_rows<MOE_DTYPE, 4>)
INSTANTIATE("route8", route_rows<MOE_DTYPE, 8>)
INSTANTIATE("route16", route_rows<MOE_DTYPE, 16>)
INSTANTIATE("route32", route_rows<MOE_DTYPE, 32>)
INSTANTIATE("gate1", gate_tokens<MOE_DTYPE, 1, 1024>)
INSTANTIATE("gate4", gate_tokens<MOE_DTYPE, 4, 512>)
INSTANTIATE("gate16", gate_tokens<MOE_DTYPE, 16, 512>)
