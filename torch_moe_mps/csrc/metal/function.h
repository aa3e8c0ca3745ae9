// MOE_FUNCTION("_name(int x) -> int", function) registers a function that is for Python alone.
#pragma once
#include <torch/library.h>

#define MOE_FUNCTION(schema, function) \
  TORCH_LIBRARY_FRAGMENT(moe_mps, m) { \
    m.def(schema, &moe_mps::function); \
  }
