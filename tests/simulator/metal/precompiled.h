// What most sources of host code include, parsed once for all of them.
#pragma once
#ifdef __linux__
#include <objc/runtime.h>  // before C++: clang would take its Protocol for another class than its own
#endif
#define AT_PER_OPERATOR_HEADERS  // ATen's headers include the operators that they call, not all of them
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
