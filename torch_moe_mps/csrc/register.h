// Registers operators for MPS, each behind its argument checks: MOE_OPERATOR(rms_norm) the function of that
// name.
#pragma once
#include <torch/library.h>

#include <optional>
#include <vector>

#include "groups.h"
#include "metal/faults.h"
#include "signature.h"

namespace moe_mps {

// The places of the arguments that an operator writes, by its schema.
std::vector<size_t> written_by(const char* operator_name);

// Raises an error if an argument that will be written shares memory with another one; null is no tensor. This
// is checked in every call: a signature has no addresses.
void prepare_writes(const char* operator_name, c10::ArrayRef<size_t> written,
                    c10::ArrayRef<const at::Tensor*> arguments);

inline const at::Tensor* tensor_of(const at::Tensor& argument) {
  return &argument;
}
inline const at::Tensor* tensor_of(const std::optional<at::Tensor>& argument) {
  return argument ? &*argument : nullptr;
}
template <class T>
const at::Tensor* tensor_of(const T&) {
  return nullptr;
}

template <auto function, class Parameters, class Arguments>
struct CheckedCall;

template <class Result, class... Parameters, Result (*function)(Parameters...), class... Arguments>
struct CheckedCall<function, Gathered<Parameters...>, Types<Arguments...>> {
  static inline const char* name;

  static Result call(Arguments... arguments) {
    check_call(name, arguments...);
    name_work(name);
    static const std::vector<size_t> written = written_by(name);
    if (!written.empty()) prepare_writes(name, written, {tensor_of(arguments)...});
    return Gathered<Parameters...>::call(function, std::forward_as_tuple(arguments...));
  }
};

// The function of an operator with the arguments of its schema, checked.
template <auto function>
struct Checked;

template <class Result, class... Parameters, Result (*function)(Parameters...)>
struct Checked<function>
    : CheckedCall<function, Gathered<Parameters...>, typename Gathered<Parameters...>::Arguments> {};

// The kernel of AutogradMPS: inference goes on to the kernel of MPS. If a gradient is needed, the Python
// kernel of the Autograd key runs and raises an error that names the operator.
void without_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

template <auto function>
void implement(torch::Library& library, const char* name) {
  Checked<function>::name = name;
  library.impl(name, torch::dispatch(c10::DispatchKey::MPS, Checked<function>::call));
  library.impl(name, torch::dispatch(c10::DispatchKey::AutogradMPS,
                                     torch::CppFunction::makeFromBoxedFunction<&without_gradients>()));
}

}  // namespace moe_mps

#define MOE_OPERATOR(function)         \
  TORCH_LIBRARY_FRAGMENT(moe_mps, m) { \
    implement<function>(m, #function); \
  }
