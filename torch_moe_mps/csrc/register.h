// Registers the operators of a family for MPS, each behind its argument check:
//
//   TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
//     implement<rms_norm>(m, "rms_norm");
//   }
#pragma once
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
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

// An operator that writes in place. It keeps the Python kernel of the Autograd key, which raises an error
// that names the operator; torch's fallback would mark returned outputs only and let gradients get lost.
template <auto function>
void implement_in_place(torch::Library& library, const char* name) {
  Checked<function>::name = name;
  library.impl(name, torch::dispatch(c10::DispatchKey::MPS, Checked<function>::call));
}

template <auto function>
void implement(torch::Library& library, const char* name) {
  implement_in_place<function>(library, name);
  library.impl(name, torch::dispatch(c10::DispatchKey::AutogradMPS,
                                     torch::autograd::autogradNotImplementedFallback()));
}

}  // namespace moe_mps
