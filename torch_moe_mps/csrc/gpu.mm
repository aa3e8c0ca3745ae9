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

// Returns what held before.
int64_t plan_for(int64_t of_cores) {
  return cores.exchange(of_cores);
}

}  // namespace

int64_t gpu_cores() {
  int64_t known = cores;
  if (known == 0) cores = known = cores_of_this_gpu();
  return known;
}

}  // namespace moe_mps

MOE_FUNCTION("_gpu_cores() -> int", gpu_cores)
// Plans for a GPU with so many cores; 0 means those of this machine's GPU.
MOE_FUNCTION("_plan_for(int cores) -> int", plan_for)
