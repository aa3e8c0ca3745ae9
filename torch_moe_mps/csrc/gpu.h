// What a plan has to know of the GPU.
#pragma once
#include <cstdint>
#include <string_view>

namespace moe_mps {

// The cores of the GPU with this name (MTLDevice.name). Chips of one name differ; the table has the largest.
int64_t cores_of(std::string_view name);

// The cores of this machine's GPU, or of the GPU that `_plan_for` was given.
int64_t gpu_cores();

}  // namespace moe_mps
