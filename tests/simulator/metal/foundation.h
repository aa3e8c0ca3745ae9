// Autorelease pools of the current thread.
#pragma once
#include <cstddef>

namespace simulator {
size_t pool_depth();
void drain_pools(size_t depth);
}  // namespace simulator
