#include "gpu.h"

#include <ATen/mps/MPSDevice.h>
#include <torch/library.h>

#include <atomic>

namespace moe_mps {
namespace {

constexpr int64_t kUnknownCores = 16;

// 0: not asked yet.
std::atomic<int64_t>& cores() {
  static std::atomic<int64_t> instance = 0;
  return instance;
}

int64_t cores_of_this_gpu() {
  const unsigned counted = at::mps::MPSDevice::getInstance()->getCoreCount();
  return counted == 0 ? kUnknownCores : counted;
}

void plan_for(int64_t count) {
  cores() = count;
}

}  // namespace

int64_t gpu_cores() {
  int64_t known = cores();
  if (known == 0) cores() = known = cores_of_this_gpu();
  return known;
}

}  // namespace moe_mps

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.def("_gpu_cores() -> int", &moe_mps::gpu_cores);
  // Plans for a GPU with so many cores; 0 means this machine's GPU.
  m.def("_plan_for(int cores) -> ()", &moe_mps::plan_for);
}
