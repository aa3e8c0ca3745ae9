// MTLResidencySet: which buffers, and heaps of buffers, are kept ready for the GPU.
#import <Metal/Metal.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "foundation.h"
#include "metal.h"
#include "runtime.h"

using simulator::fail;

namespace {

std::mutex mutex;
// In how many sets with residency an allocation is.
std::map<const void*, int> resident;
std::atomic<int> requested{0};  // sets
std::atomic<int> requests{0};
std::atomic<size_t> heap_limit{0};
constexpr NSUInteger kOneHeap = NSUInteger{1} << 40;  // for all buffers below the limit

void count(const std::set<const void*>& allocations, int change) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const void* allocation : allocations) resident[allocation] += change;
}

void check_alive(const char* method, const void* allocation) {
  if (simulated_is_heap(allocation) || simulator::buffer_memory(allocation)) return;
  fail(std::string(method) + ": an allocation was freed, which nobody but the set may have retained");
}

}  // namespace

@implementation MTLResidencySetDescriptor
- (NSUInteger)initialCapacity {
  return _capacity;
}
- (void)setInitialCapacity:(NSUInteger)capacity {
  _capacity = capacity;
}
@end

@interface SimulatorResidencySet : NSObject <MTLResidencySet> {
 @public
  // Allocations. Metal promises nowhere that a set retains them, so this one does not.
  std::set<const void*>*added, *committed;
  bool is_requested;
}
@end
@implementation SimulatorResidencySet
- (void)addAllocation:(id)allocation {
  if (allocation == nil) fail("addAllocation: of nil");
  if (!simulated_is_heap((__bridge void*)allocation) && [(id<MTLBuffer>)allocation heap] != nil)
    fail("addAllocation: a buffer of a heap is resident with its heap alone");
  added->insert((void*)allocation);
}
- (void)removeAllocation:(id)allocation {
  if (added->erase((void*)allocation) == 0) fail("removeAllocation: of what is not in the set");
  check_alive("removeAllocation", (void*)allocation);
}
- (void)removeAllAllocations {
  while (!added->empty()) [self removeAllocation:(__bridge id) * added->begin()];
}
- (void)commit {
  const std::set<const void*> before = *committed;
  *committed = *added;
  if (is_requested) {
    count(before, -1);
    count(*committed, 1);
  }
}
- (void)requestResidency {
  if (*added != *committed) fail("requestResidency: commit what was added first");
  for (const void* allocation : *committed) check_alive("requestResidency", allocation);
  requests++;
  if (is_requested) return;
  is_requested = true;
  requested++;
  count(*committed, 1);
}
- (void)endResidency {
  if (!is_requested) fail("endResidency: it was not requested");
  is_requested = false;
  requested--;
  count(*committed, -1);
}
- (void)dealloc {
  if (is_requested) simulator::report("a residency set is released before endResidency");
  if (!committed->empty()) simulator::report("a residency set is released with allocations in it");
  delete added;
  delete committed;
  [super dealloc];
}
@end

id<MTLResidencySet> simulated_residency_set(MTLResidencySetDescriptor* descriptor) {
  if (descriptor == nil) fail("newResidencySetWithDescriptor: needs a descriptor");
  SimulatorResidencySet* set = [SimulatorResidencySet new];
  set->added = new std::set<const void*>;
  set->committed = new std::set<const void*>;
  return set;
}

id<MTLHeap> simulated_heap(size_t bytes) {
  if (bytes >= heap_limit) return nil;
  static id<MTLHeap> heap = [] {
    MTLHeapDescriptor* descriptor = [MTLHeapDescriptor new];
    descriptor.size = kOneHeap;
    descriptor.storageMode = MTLStorageModeShared;
    id<MTLHeap> made = simulated_new_heap(descriptor);
    [descriptor release];
    simulator::keep_for_the_process(made);
    return made;
  }();
  return heap;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void simulator_set_heap_limit(size_t bytes) {
  heap_limit = bytes;
}
EXPORT int simulator_residency_sets() {
  return requested;
}
EXPORT int simulator_residency_requests() {
  return requests;
}
EXPORT int simulator_is_resident(const void* buffer) {
  const void* heap = (__bridge void*)[(__bridge id<MTLBuffer>)buffer heap];
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = resident.find(heap ? heap : buffer);
  return found != resident.end() && found->second > 0;
}
