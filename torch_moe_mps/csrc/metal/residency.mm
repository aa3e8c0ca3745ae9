// Residency sets, which keep memory ready for the GPU where macOS would take it back after about a second
// without work. They come with macOS 15; before, nothing happens. macOS 26 takes back that of a set, too,
// unless it is asked for again and again (llama.cpp#17766). It is not asked for while the GPU works, which
// keeps the memory anyway, nor after some minutes without work: a server that waits leaves the memory to
// other programs, and gets it back with its next work. Kernel panics are reported where sets change often: a
// set never changes here, it is made whole and ends whole.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSStream.h>
#import <Metal/Metal.h>
#include <objc/runtime.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "encoder.h"
#include "faults.h"
#include "function.h"

// Declared here: SDKs before macOS 15, one of which may have built this, have no such types.
@protocol MoeResidencySetDescriptor <NSObject>
- (void)setInitialCapacity:(NSUInteger)capacity;
@end
@protocol MoeResidencySet <NSObject>
- (void)addAllocation:(id)allocation;
- (void)removeAllAllocations;
- (void)commit;
- (void)requestResidency;
- (void)endResidency;
@end
@protocol MoeResidencyDevice <NSObject>
- (id<MoeResidencySet>)newResidencySetWithDescriptor:(id)descriptor error:(NSError**)error;
@end

namespace moe_mps {
namespace {

struct Set {
  id<MoeResidencySet> set;
  std::vector<id> allocations;  // retained
};

constexpr std::chrono::milliseconds kAskedEvery(500);
constexpr double kIdleSeconds = 180;

struct Sets {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, Set> held;
  int64_t last = 0;
  bool has_thread = false;
  double idle = kIdleSeconds;  // without work, after which nothing is asked for
};

Sets& sets = *new Sets;

// Asks for the memory of all sets in pauses of the work, as long as there are any. It encodes nothing.
// Not while the GPU works: what it uses is resident anyway, and macOS has panicked where sets were
// asked for beside much work.
void keep_asking() {
  std::unique_lock<std::mutex> lock(sets.mutex);
  int64_t encoded = encoded_dispatches();
  auto worked = std::chrono::steady_clock::now();
  while (!sets.changed.wait_for(lock, kAskedEvery, [] { return sets.held.empty(); })) {
    const auto now = std::chrono::steady_clock::now();
    const bool works = has_incomplete_work();
    if (const int64_t count = encoded_dispatches(); works || count != encoded) {
      encoded = count;
      worked = now;
    }
    if (works) continue;
    if (std::chrono::duration<double>(now - worked).count() >= sets.idle) continue;
    @autoreleasepool {
      for (const auto& [number, set] : sets.held) [set.set requestResidency];
    }
  }
  sets.has_thread = false;
}

// Memory that becomes resident with a tensor: its buffer, or the heap that the buffer lies in.
id allocation_of(const at::Tensor& tensor) {
  const id<MTLBuffer> buffer = __builtin_bit_cast(id<MTLBuffer>, tensor.storage().data());
  const id heap = [buffer heap];
  return heap == nil ? buffer : heap;
}

// The number of a set of the tensors' memory, which is resident from now on; 0 where there are no such sets.
int64_t keep_resident(at::TensorList tensors) {
  @autoreleasepool {
    const id device = at::mps::getCurrentMPSStream()->device();
    if (![device respondsToSelector:@selector(newResidencySetWithDescriptor:error:)]) return 0;
    const id<MoeResidencySetDescriptor> descriptor = [objc_getClass("MTLResidencySetDescriptor") new];
    [descriptor setInitialCapacity:tensors.size()];
    Set made{
        [static_cast<id<MoeResidencyDevice>>(device) newResidencySetWithDescriptor : descriptor error : nil],
        {}};
    [descriptor release];
    if (made.set == nil) return 0;
    std::set<const void*> added;
    for (const at::Tensor& tensor : tensors) {
      const id allocation = allocation_of(tensor);
      if (!added.insert((__bridge const void*)allocation).second) continue;
      [made.set addAllocation:allocation];
      made.allocations.push_back([allocation retain]);
    }
    [made.set commit];
    [made.set requestResidency];
    const std::lock_guard<std::mutex> lock(sets.mutex);
    sets.held.emplace(++sets.last, std::move(made));
    if (!sets.has_thread) std::thread(keep_asking).detach();
    sets.has_thread = true;
    return sets.last;
  }
}

void end_residency(int64_t number) {
  const std::lock_guard<std::mutex> lock(sets.mutex);
  const auto found = sets.held.find(number);
  if (found == sets.held.end()) return;
  @autoreleasepool {
    [found->second.set endResidency];
    [found->second.set removeAllAllocations];
    [found->second.set commit];
    [found->second.set release];
    for (const id allocation : found->second.allocations) [allocation release];
  }
  sets.held.erase(found);
  sets.changed.notify_all();
}

void ask_until_idle(double seconds) {
  const std::lock_guard<std::mutex> lock(sets.mutex);
  sets.idle = seconds;
}

}  // namespace
}  // namespace moe_mps

MOE_FUNCTION("_keep_resident(Tensor[] tensors) -> int", keep_resident)
MOE_FUNCTION("_end_residency(int set) -> ()", end_residency)
// After how many seconds without work the memory is no longer asked for; 180 unless somebody says so.
MOE_FUNCTION("_ask_until_idle(float seconds) -> ()", ask_until_idle)
