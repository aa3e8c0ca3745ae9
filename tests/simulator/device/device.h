// What the parts of the PyTorch side share.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <functional>

namespace simulator {

inline const c10::Device kMps(c10::DeviceType::MPS, 0);

// The data pointer of an allocation is the id<MTLBuffer>, as on macOS, never a host address.
c10::Allocator* allocator();

// A CPU tensor that lies over the contents of an mps tensor and keeps its memory alive. What is recorded may
// still write there.
at::Tensor host_view(const at::Tensor& tensor);

// Runs what was recorded; raises the findings. By the host's clock it takes no time: it is what stands in for
// operators that a Mac encodes.
void synchronize();
// The same, where the host of a Mac waits, too.
void synchronize_host();
// In a block of the current stream's queue, as torch encodes: another thread may.
void in_queue(const std::function<void()>& act);
void end_encoder();
void commit_in_queue();
// While it lives, the thread computes on the CPU in place of an operator that a Mac encodes: no wait of the
// host.
struct StandIn {
  // `waits`: whether the host of a Mac waits behind it, too.
  explicit StandIn(bool waits = false);
  ~StandIn();
  static bool is_there();
  // One operator of the GPU, if it is none's part.
  void count() const;
};

void* stream_queue();
void* stream_command_buffer();

}  // namespace simulator
