// Host code of `torch-moe-mps check --probe`; selfcheck/probe.py says what it is for.
#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

#include "../shaders/geometry.h"
#include "../shaders/params.h"
#include "metal/encoder.h"

namespace moe_mps {
namespace {

void commit() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      stream->synchronize(at::mps::SyncType::COMMIT);
    }
  });
}

// Encodes a kernel of shaders/probe.metal `times` times, each as an operator does. The stream is committed
// after every `in_buffer` dispatches; 0: not here.
void probe(const std::string& kernel, const std::vector<at::Tensor>& buffers, int64_t groups, int64_t threads,
           int64_t steps, int64_t times, int64_t in_buffer) {
  TORCH_CHECK_VALUE(groups > 0 && threads > 0 && steps >= 0 && times > 0 && in_buffer >= 0,
                    "moe_mps::_probe: counts must be positive");
  for (int64_t i = 1; i <= times; ++i) {
    Commands commands;
    Command& command = commands.add(probe_library(), kernel);
    for (const at::Tensor& buffer : buffers) command.bind(buffer);
    if (steps > 0) command.params(ProbeParams{static_cast<uint32_t>(steps)});
    command.threadgroups({groups}, {threads});
    commands.encode();
    if (in_buffer > 0 && i % in_buffer == 0) commit();
  }
}

}  // namespace
}  // namespace moe_mps

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.def("_probe(str kernel, Tensor[] buffers, int groups, int threads, int steps, int times=1, int "
        "in_buffer=0) -> ()");
  m.impl("_probe", torch::dispatch(c10::DispatchKey::MPS, &moe_mps::probe));
}
