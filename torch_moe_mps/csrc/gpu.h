// Facts of the GPU that a plan has to know.
#pragma once
#include <cstdint>

namespace moe_mps {

// The cores of this machine's GPU as the system counts them, or those that `_plan_for` was given.
int64_t gpu_cores();

}  // namespace moe_mps
