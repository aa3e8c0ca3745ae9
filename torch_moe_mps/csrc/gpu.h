// Facts of the GPU that a plan has to know.
#pragma once
#include <cstdint>

namespace moe_mps {

// The cores of this machine's GPU as the system counts them, or those that `_plan_for` was given.
int64_t gpu_cores();

// The registers of 32 bits that a thread has before it spills, as others measured: 128 on the M1 and M2, 96
// on the M4 and so perhaps the M3, 124 on the M5; or those that `_plan_for` was given.
int64_t gpu_registers();

}  // namespace moe_mps
