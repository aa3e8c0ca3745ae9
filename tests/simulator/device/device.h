// What the parts of the PyTorch side share.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace simulator {

inline const c10::Device kMps(c10::DeviceType::MPS, 0);

// The data pointer of an allocation is the id<MTLBuffer>, as on macOS, never a host address.
c10::Allocator* allocator();

// Runs what was recorded; raises the findings.
void synchronize();

void* stream_queue();
void* stream_command_buffer();

}  // namespace simulator
