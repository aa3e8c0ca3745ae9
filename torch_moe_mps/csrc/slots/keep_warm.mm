#include "keep_warm.h"

#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#import <Metal/Metal.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <tuple>

#include "../../shaders/geometry.h"
#include "../../shaders/params.h"
#include "../metal/function.h"
#include "../metal/library.h"

namespace moe_mps {
namespace {

using BeatTime = std::chrono::steady_clock;

// Without a request for so long, no token is computed: the thread sleeps until the next one.
constexpr std::chrono::seconds kParkedAfter(1);
constexpr NSUInteger kBeatGroups = 16, kBeatThreads = 256;

struct KeepWarm {
  std::mutex mutex;
  std::condition_variable changed;
  double every = 0;            // seconds between two beats; 0: none
  int64_t steps = 0;           // of the kernel
  int64_t waiting = 0;         // requests that the GPU waits for
  BeatTime::time_point asked;  // the last of them
  bool has_thread = false, is_parked = false;
  bool is_beating = false;  // the GPU has a beat that has not ended: it gets no second one
  int64_t beats = 0;
  const Pipeline* pipeline = nullptr;
  id<MTLCommandQueue> queue = nil;
  id<MTLBuffer> out = nil;  // what the kernel writes and nobody reads. Torch's memory may be in use elsewhere
};

KeepWarm& warm = *new KeepWarm;  // Metal may tell of a beat while the process ends

// A fork has no GPU, and not the thread, which may hold the mutex.
void renew_warm() {
  new (&warm) KeepWarm;
}
const int warm_renewed = pthread_atfork(nullptr, nullptr, renew_warm);

// A failed one is the last: what macOS says of it, the model's own buffers are told, too.
void end_beat(bool has_failed) {
  const std::lock_guard<std::mutex> lock(warm.mutex);
  warm.is_beating = false;
  if (has_failed) warm.every = 0;
}

// Without the mutex: a commit may wait.
void beat(int64_t steps) {
  @autoreleasepool {
    const float factors[2] = {0.5f, 0.5f};
    const ProbeParams params{static_cast<uint32_t>(steps)};
    const id<MTLCommandBuffer> buffer = [warm.queue commandBuffer];
    const id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
    [encoder setComputePipelineState:warm.pipeline->state];
    [encoder setBytes:factors length:sizeof(factors) atIndex:0];
    [encoder setBuffer:warm.out offset:0 atIndex:1];
    [encoder setBytes:&params length:sizeof(params) atIndex:2];
    [encoder dispatchThreadgroups:MTLSizeMake(kBeatGroups, 1, 1)
            threadsPerThreadgroup:MTLSizeMake(std::min(kBeatThreads, warm.pipeline->most_threads), 1, 1)];
    [encoder endEncoding];
    [buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      end_beat([done status] == MTLCommandBufferStatusError);
    }];
    [buffer commit];
  }
}

void keep_beating() {
  std::unique_lock<std::mutex> lock(warm.mutex);
  while (true) {
    if (warm.every == 0 || (warm.waiting == 0 && BeatTime::now() - warm.asked > kParkedAfter)) {
      warm.is_parked = true;
      warm.changed.wait(lock);
      continue;
    }
    warm.is_parked = false;
    if (warm.waiting > 0 && !warm.is_beating) {
      warm.is_beating = true;
      ++warm.beats;
      const int64_t steps = warm.steps;
      lock.unlock();
      beat(steps);
      lock.lock();
    }
    warm.changed.wait_for(lock, std::chrono::duration<double>(warm.every));
  }
}

void keep_warm(double every, int64_t steps) {
  TORCH_CHECK_VALUE(every >= 0 && steps > 0, "moe_mps::_keep_warm: seconds and steps must be positive, got ",
                    every, " and ", steps);
  const std::lock_guard<std::mutex> lock(warm.mutex);
  warm.every = every;
  warm.steps = steps;
}

// The beats so far, and whether the thread sleeps until the next request.
std::tuple<int64_t, bool> beats() {
  const std::lock_guard<std::mutex> lock(warm.mutex);
  return {warm.beats, !warm.has_thread || warm.is_parked};
}

// The kernel of a beat; null where Metal does not compile it.
const Pipeline* beat_pipeline() {
  try {
    return &pipeline(probe_library(), "probe_fma");
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Starts the thread once it has all that beats need. Returns: whether it runs. Under the mutex.
bool begin_beating(const Pipeline* pipeline, id<MTLDevice> device) {
  if (warm.has_thread) return true;  // another thread was first
  warm.pipeline = pipeline;
  if (warm.queue == nil) warm.queue = [device newCommandQueue];
  if (warm.out == nil) {
    warm.out = [device newBufferWithLength:kBeatGroups * kBeatThreads * sizeof(float)
                                   options:MTLResourceStorageModeShared];
  }
  if (pipeline == nullptr || warm.queue == nil || warm.out == nil) return false;
  try {
    std::thread(keep_beating).detach();
  } catch (const std::system_error&) {
    return false;
  }
  return warm.has_thread = true;
}

}  // namespace

void prepare_keep_warm() {
  {
    const std::lock_guard<std::mutex> lock(warm.mutex);
    if (warm.every == 0 || warm.has_thread) return;
  }
  const Pipeline* compiled = beat_pipeline();
  const id<MTLDevice> device = at::mps::getCurrentMPSStream()->device();
  const std::lock_guard<std::mutex> lock(warm.mutex);
  if (!begin_beating(compiled, device)) warm.every = 0;  // the model does without
}

void gpu_waits() {
  const std::lock_guard<std::mutex> lock(warm.mutex);
  ++warm.waiting;
  warm.asked = BeatTime::now();
  if (warm.is_parked) warm.changed.notify_all();
}

void gpu_goes_on() {
  const std::lock_guard<std::mutex> lock(warm.mutex);
  --warm.waiting;
}

void end_keep_warm() {
  const std::lock_guard<std::mutex> lock(warm.mutex);
  warm.every = 0;
}

}  // namespace moe_mps

// A beat after so many seconds while the GPU waits for experts, or none after 0; and the steps of its kernel.
MOE_FUNCTION("_keep_warm(float seconds, int steps) -> ()", keep_warm)
MOE_FUNCTION("_beats() -> (int, bool)", beats)
