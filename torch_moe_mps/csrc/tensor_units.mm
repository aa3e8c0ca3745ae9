#include "tensor_units.h"

#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#import <Metal/Metal.h>

#include <atomic>
#include <mutex>
#include <set>

#include "metal/function.h"

namespace moe_mps {
namespace {

enum class Use { kNone, kAll, kAllowed };

struct Permission {
  std::atomic<Use> use = Use::kNone;
  std::atomic<bool> allows_any = false;
  std::mutex mutex;
  std::set<std::string> allowed;  // names of libraries
};

Permission& permission = *new Permission;

// Why kernels of tensor_units.metal cannot run here, or would not be faster; empty if they can.
std::string why_no_tensor_units() {
  id<MTLDevice> device = at::mps::getCurrentMPSStream()->device();
  @autoreleasepool {
    if (!has_tensors(device)) return c10::str("they need ", kTensorUnitsNeed);
    // The family of the M5, by number: SDKs before macOS 26, which may have built this, have no name for it.
    constexpr auto kApple10 = static_cast<MTLGPUFamily>(1010);
    if ([device supportsFamily:kApple10]) return "";
    return c10::str([[device name] UTF8String], " has none, which the M5 and later have");
  }
}

void set_tensor_units(std::string_view use) {
  TORCH_CHECK_VALUE(use == "0" || use == "1" || use == "auto",
                    "moe_mps::_set_tensor_units: use must be 0, 1 or auto, got ", use);
  permission.use = use == "0" ? Use::kNone : use == "1" ? Use::kAll : Use::kAllowed;
}

void allow_tensor_units(const std::string& library, bool allowed) {
  const std::lock_guard<std::mutex> lock(permission.mutex);
  if (allowed) {
    permission.allowed.insert(library);
  } else {
    permission.allowed.erase(library);
  }
  permission.allows_any = !permission.allowed.empty();
}

}  // namespace

// By a class that Metal 4 added: the version that macOS reports depends on the program's SDK.
bool has_tensors(id<MTLDevice> device) {
  return [device respondsToSelector:@selector(newTensorWithDescriptor:error:)];
}

bool uses_tensor_units(const Library& library) {
  const Use use = permission.use;
  if (library.dtype == at::kFloat || use == Use::kNone) return false;
  if (use == Use::kAll) return true;
  if (!permission.allows_any) return false;
  const std::lock_guard<std::mutex> lock(permission.mutex);
  return permission.allowed.count(library.name()) > 0;
}

}  // namespace moe_mps

MOE_FUNCTION("_why_no_tensor_units() -> str", why_no_tensor_units)
MOE_FUNCTION("_set_tensor_units(str use) -> ()", set_tensor_units)
MOE_FUNCTION("_allow_tensor_units(str library, bool allowed) -> ()", allow_tensor_units)
