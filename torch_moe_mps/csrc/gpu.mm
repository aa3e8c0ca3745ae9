#include "gpu.h"

#include <ATen/mps/MPSDevice.h>
#import <Metal/Metal.h>

#include <atomic>
#include <tuple>

#include "metal/function.h"

namespace moe_mps {
namespace {

constexpr int64_t kUnknownCores = 16;

std::atomic<int64_t> cores = 0, registers = 0;  // not asked yet

int64_t cores_of_this_gpu() {
  const unsigned counted = at::mps::MPSDevice::getInstance()->getCoreCount();
  return counted == 0 ? kUnknownCores : counted;
}

int64_t registers_of_this_gpu() {
  // The families of the M3 and of the M5, by number: SDKs that may have built this have no names for them.
  constexpr auto kApple9 = static_cast<MTLGPUFamily>(1009), kApple10 = static_cast<MTLGPUFamily>(1010);
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  @autoreleasepool {
    if ([device supportsFamily:kApple10]) return 124;
    return [device supportsFamily:kApple9] ? 96 : 128;
  }
}

// Returns what held before.
std::tuple<int64_t, int64_t> plan_for(int64_t of_cores, int64_t of_registers) {
  return {cores.exchange(of_cores), registers.exchange(of_registers)};
}

}  // namespace

int64_t gpu_cores() {
  int64_t known = cores;
  if (known == 0) cores = known = cores_of_this_gpu();
  return known;
}

int64_t gpu_registers() {
  int64_t known = registers;
  if (known == 0) registers = known = registers_of_this_gpu();
  return known;
}

}  // namespace moe_mps

MOE_FUNCTION("_gpu_cores() -> int", gpu_cores)
MOE_FUNCTION("_gpu_registers() -> int", gpu_registers)
// Plans for a GPU with so many cores, and registers a thread; 0 means those of this machine's GPU.
MOE_FUNCTION("_plan_for(int cores, int registers=0) -> (int, int)", plan_for)
