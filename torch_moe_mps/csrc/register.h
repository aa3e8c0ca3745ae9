// Registers the operators of a family for MPS, each behind its argument check:
//
//   TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
//     implement<rms_norm>(m, "rms_norm");
//   }
#pragma once
#include <torch/library.h>

#include "signature.h"

namespace moe_mps {

template <auto function>
struct Checked;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Checked<function> {
  static inline const char* name;

  static Result call(Arguments... arguments) {
    check_call(name, arguments...);
    return function(arguments...);
  }
};

// The kernel of AutogradMPS: inference goes on to the kernel of MPS. Where a gradient is needed the Python
// kernel of the Autograd key runs, which raises an error that names the operator.
void without_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

template <auto function>
void implement(torch::Library& library, const char* name) {
  Checked<function>::name = name;
  library.impl(name, torch::dispatch(c10::DispatchKey::MPS, Checked<function>::call));
  library.impl(name, torch::dispatch(c10::DispatchKey::AutogradMPS,
                                     torch::CppFunction::makeFromBoxedFunction<&without_gradients>()));
}

}  // namespace moe_mps
