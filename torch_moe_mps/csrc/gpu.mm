#include "gpu.h"

#include <ATen/mps/MPSDevice.h>

#include <atomic>

#include "metal/function.h"

namespace moe_mps {
namespace {

constexpr int64_t kUnknownCores = 16;

std::atomic<int64_t> cores = 0;  // not asked yet

int64_t cores_of_this_gpu() {
  const unsigned counted = at::mps::MPSDevice::getInstance()->getCoreCount();
  return counted == 0 ? kUnknownCores : counted;
}

void plan_for(int64_t count) {
  cores = count;
}

}  // namespace

int64_t gpu_cores() {
  int64_t known = cores;
  if (known == 0) cores = known = cores_of_this_gpu();
  return known;
}

}  // namespace moe_mps

MOE_FUNCTION("_gpu_cores() -> int", gpu_cores)
// Plans for a GPU with so many cores; 0 means this machine's GPU.
MOE_FUNCTION("_plan_for(int cores) -> ()", plan_for)
