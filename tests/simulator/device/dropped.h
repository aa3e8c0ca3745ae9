// The null device: commands are dropped and operators of aten do not compute, so that what a program takes is
// the host's time.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simulator {

// Replaces the arguments on the stack by outputs of the right shapes, dtypes and strides: zeros, and 0, 1, 2,
// ... for the indices of a sort. False, with the stack as it was, where the operator has to be computed:
//   - all its tensors are of integers or booleans (masks, positions), on which the program's flow depends;
//   - its shapes depend on values (nonzero), or it has none (equal).
bool drop(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace simulator
