#include "register.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <string>

namespace moe_mps {
namespace {

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && ((at::GradMode::is_enabled() && tensor.requires_grad()) ||
                              tensor._fw_grad(0).defined());  // in forward mode
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const at::MemOverlapStatus status = at::get_overlap_status(a, b);
  return status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial;
}

const std::vector<c10::Argument>& arguments_of(const char* operator_name) {
  const std::string qualified = std::string(C10_STRINGIZE(moe_mps) "::") + operator_name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "").schema().arguments();
}

}  // namespace

std::vector<size_t> written_by(const char* operator_name) {
  const auto& arguments = arguments_of(operator_name);
  std::vector<size_t> places;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) places.push_back(i);
  }
  return places;
}

void prepare_writes(const char* operator_name, c10::ArrayRef<size_t> written,
                    c10::ArrayRef<const at::Tensor*> arguments) {
  for (const size_t place : written) {
    if (!arguments[place]) continue;
    const at::Tensor& target = *arguments[place];
    for (size_t other = 0; other < arguments.size(); ++other) {
      if (other == place || !arguments[other] || !overlap(target, *arguments[other])) continue;
      const auto& named = arguments_of(operator_name);
      TORCH_CHECK_VALUE(false, "moe_mps::", operator_name, ": ", named[place].name(),
                        " must be free of overlap with ", named[other].name(),
                        ", got a view of the same memory");
    }
    target.unsafeGetTensorImpl()->bump_version();
  }
}

void without_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const bool needed = std::any_of(first, stack->end(), [](const c10::IValue& argument) {
    return argument.isTensor() && needs_gradient(argument.toTensor());
  });
  if (needed) return op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace moe_mps
