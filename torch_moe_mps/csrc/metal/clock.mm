// Times work by the GPU's own clock.
#include <ATen/mps/MPSStream.h>
#import <Metal/Metal.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "function.h"

namespace moe_mps {
namespace {

// Seconds of the buffers that are timed, 0 until one is complete.
struct Times {
  std::mutex mutex;
  std::vector<double> seconds;
};

std::shared_ptr<Times>& times = *new std::shared_ptr<Times>(std::make_shared<Times>());

size_t added(Times& to) {
  const std::lock_guard<std::mutex> lock(to.mutex);
  to.seconds.push_back(0);
  return to.seconds.size() - 1;
}

// What is encoded from here on, up to the next commit, is timed.
void time_buffer() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  const std::shared_ptr<Times> kept = times;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      stream->synchronize(at::mps::SyncType::COMMIT);
      const size_t number = added(*kept);
      [[stream->commandBuffer() rootCommandBuffer] addCompletedHandler:^(id<MTLCommandBuffer> done) {
        const std::lock_guard<std::mutex> lock(kept->mutex);
        kept->seconds[number] = [done GPUEndTime] - [done GPUStartTime];
      }];
    }
  });
}

std::vector<double> buffer_seconds() {
  const std::shared_ptr<Times> read = std::exchange(times, std::make_shared<Times>());
  const std::lock_guard<std::mutex> lock(read->mutex);
  return read->seconds;
}

}  // namespace
}  // namespace moe_mps

MOE_FUNCTION("_time_buffer() -> ()", time_buffer)
// Of the buffers that were timed since the last call, in order; after waiting for them.
MOE_FUNCTION("_buffer_seconds() -> float[]", buffer_seconds)
