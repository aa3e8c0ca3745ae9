// The router's choice among up to 32 * MOE_WIDTH experts.
#include "router.h"

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)

INSTANTIATE("route" TEXT(MOE_WIDTH), route_rows<MOE_DTYPE, MOE_WIDTH>)
