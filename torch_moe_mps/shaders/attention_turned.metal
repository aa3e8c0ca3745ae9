#include "attention/turned.h"

INSTANTIATE_ATTENTION("attention_turned", attention_turned, MOE_DTYPE)
