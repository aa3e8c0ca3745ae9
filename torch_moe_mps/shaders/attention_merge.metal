#include "attention/merge.h"

INSTANTIATE("attention_merge", attention_merge<MOE_DTYPE, false>)
INSTANTIATE("attention_merge_gated", attention_merge<MOE_DTYPE, true>)
