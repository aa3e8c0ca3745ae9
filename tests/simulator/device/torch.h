// What torch itself does on a Mac, beside the kernels of its operators: copies to the CPU, errors that it
// stores. All that depends on its version is here.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "../metal/runtime.h"

namespace simulator {

// The minor version of torch 2 that is simulated: that of SIMULATED_TORCH in the environment, or 15.
int torch_minor();

// What torch's own kernel for an operator of aten does on a Mac, by aten.json.
struct Aten {
  bool is_graph = false;         // MPSGraph, which ends the encoder
  bool waits = false;            // the host waits for the GPU
  size_t threadgroup_bytes = 0;  // the most that one of its kernels declares
};
// It is noted: `simulator_called_aten`.
Aten aten(const std::string& name, const std::string& overload);

// A copy from mps to the CPU that does not block. Until its command buffer is complete the destination is
// poison, and a read of it a finding that names the line of the copy. Torch blits where both sides have the
// same strides; otherwise it blits into a temporary, which it reads at once.
void copy_without_waiting(const at::Tensor& source, const at::Tensor& destination);

// A copy from the CPU to mps that does not block. Torch keeps the source, which the GPU reads at the copy's
// turn: a change before is a finding that names the line of the copy. Where types or strides differ, it is
// another one of torch's own.
void copy_to_mps_without_waiting(const at::Tensor& source, const at::Tensor& destination);

// The GPU writes whole words: raises as torch does for a destination on the CPU that lies elsewhere.
void check_alignment(const at::Tensor& destination);

// Raises the stored error of a stream, once: where torch waits.
void raise_stored_error(StreamNumber stream);

}  // namespace simulator
