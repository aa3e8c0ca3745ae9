#include "gpu.h"

#include <ATen/mps/MPSStream.h>
#import <Metal/Metal.h>
#include <torch/library.h>

#include <atomic>
#include <utility>

namespace moe_mps {
namespace {

constexpr int64_t kUnknownCores = 16;

// By the chip, the name without "Apple ".
constexpr std::pair<std::string_view, int64_t> kCores[] = {
    {"M1", 8},      {"M1 Pro", 16},   {"M1 Max", 32}, {"M1 Ultra", 64}, {"M2", 10},     {"M2 Pro", 19},
    {"M2 Max", 38}, {"M2 Ultra", 76}, {"M3", 10},     {"M3 Pro", 18},   {"M3 Max", 40}, {"M3 Ultra", 80},
    {"M4", 10},     {"M4 Pro", 20},   {"M4 Max", 40}, {"M5", 10},       {"M5 Pro", 20}, {"M5 Max", 40},
};

}  // namespace

int64_t cores_of(std::string_view name) {
  constexpr std::string_view kMaker = "Apple ";
  if (name.substr(0, kMaker.size()) != kMaker) return kUnknownCores;
  for (const auto& [chip, cores] : kCores) {
    if (name.substr(kMaker.size()) == chip) return cores;
  }
  return kUnknownCores;
}

namespace {

// 0: not asked yet.
std::atomic<int64_t>& cores() {
  static std::atomic<int64_t> instance = 0;
  return instance;
}

int64_t cores_of_this_gpu() {
  @autoreleasepool {
    return cores_of([[at::mps::getCurrentMPSStream()->device() name] UTF8String]);
  }
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
  m.def("_gpu_cores(str name) -> int", &moe_mps::cores_of);
  // Plans for a GPU with so many cores; 0 means this machine's GPU.
  m.def("_plan_for(int cores) -> ()", &moe_mps::plan_for);
}
