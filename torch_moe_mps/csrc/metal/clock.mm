// Times work by the GPU's own clock.
#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#import <Metal/Metal.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "faults.h"
#include "function.h"

namespace moe_mps {
namespace {

// Buffers that are timed.
struct Times {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<double> seconds;
  size_t missing = 0;  // buffers that are not complete

  size_t added() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++missing;
    seconds.emplace_back();
    return seconds.size() - 1;
  }
  void tell(size_t number, double of_buffer) {
    const std::lock_guard<std::mutex> lock(mutex);
    seconds[number] = of_buffer;
    --missing;
    changed.notify_all();
  }
};

struct Clock {
  std::mutex mutex;
  std::shared_ptr<Times> times = std::make_shared<Times>();  // since they were read
};

Clock& gpu_clock = *new Clock;

// The times so far; from here on they are `next`, if there is one.
std::shared_ptr<Times> times(std::shared_ptr<Times> next = nullptr) {
  const std::lock_guard<std::mutex> lock(gpu_clock.mutex);
  return next == nullptr ? gpu_clock.times : std::exchange(gpu_clock.times, std::move(next));
}

// Times all that is encoded from here on, up to the next commit.
void time_buffer() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  const std::shared_ptr<Times> kept = times();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      stream->synchronize(at::mps::SyncType::COMMIT);
      const size_t number = kept->added();
      [[stream->commandBuffer() rootCommandBuffer] addCompletedHandler:^(id<MTLCommandBuffer> done) {
        kept->tell(number, [done GPUEndTime] - [done GPUStartTime]);
      }];
    }
  });
}

// Metal tells on a thread of its own, which may be behind the host's.
std::vector<double> buffer_seconds() {
  const std::shared_ptr<Times> read = times(std::make_shared<Times>());
  std::unique_lock<std::mutex> lock(read->mutex);
  const bool all = read->changed.wait_for(lock, kToldWithin, [&] { return read->missing == 0; });
  TORCH_CHECK(all, "moe_mps: Metal has not told how long ", read->missing, " command buffers took, ",
              kToldWithin.count(), " s behind a wait for them");
  return read->seconds;
}

}  // namespace
}  // namespace moe_mps

MOE_FUNCTION("_time_buffer() -> ()", time_buffer)
// Times of the buffers since the last call, in order; waits for them.
MOE_FUNCTION("_buffer_seconds() -> float[]", buffer_seconds)
