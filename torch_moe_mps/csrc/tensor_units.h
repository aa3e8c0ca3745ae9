// Whether matmuls run on tensor units, which the GPUs of the M5 and later have.
#pragma once
#include "metal/library.h"

namespace moe_mps {

// Whether the kernels of this library of tensor_units.metal are used. MOE_MPS_TENSOR_UNITS says: none ("0"),
// all ("1"), or those that passed selfcheck.py on this machine ("auto").
bool uses_tensor_units(const Library& library);

// Least macOS that they need: _versions.py has the number.
constexpr const char* kTensorUnitsNeed = "macOS 26.2 or newer";

// Whether this macOS has Metal 4, whose tensors tensor_units.metal needs.
bool has_tensors(id<MTLDevice> device);

}  // namespace moe_mps
