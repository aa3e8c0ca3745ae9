#include "register.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace moe_mps {
namespace {

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && ((at::GradMode::is_enabled() && tensor.requires_grad()) ||
                              tensor._fw_grad(0).defined());  // of forward mode
}

}  // namespace

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
