// MTLHeap: memory of which buffers are made, where the heap finds room or at a place that is asked for.
#import <Metal/Metal.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "foundation.h"
#include "metal.h"
#include "runtime.h"

namespace {

constexpr NSUInteger kHeapAlignment = 256;  // assumed of Metal's buffers

struct Heaps {
  std::mutex mutex;
  std::set<const void*> live;
};
Heaps& all_heaps() {
  static Heaps& instance = *new Heaps;
  return instance;
}

NSUInteger aligned(NSUInteger value, NSUInteger alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

@implementation MTLHeapDescriptor
- (instancetype)init {
  _storageMode = MTLStorageModePrivate;
  return self;
}
- (NSUInteger)size {
  return _size;
}
- (void)setSize:(NSUInteger)size {
  _size = size;
}
- (MTLHeapType)type {
  return _type;
}
- (void)setType:(MTLHeapType)type {
  _type = type;
}
- (MTLStorageMode)storageMode {
  return _storageMode;
}
- (void)setStorageMode:(MTLStorageMode)mode {
  _storageMode = mode;
}
- (MTLHazardTrackingMode)hazardTrackingMode {
  return _hazardTrackingMode;
}
- (void)setHazardTrackingMode:(MTLHazardTrackingMode)mode {
  _hazardTrackingMode = mode;
}
@end

@interface SimulatorHeap : NSObject <MTLHeap> {
 @public
  NSUInteger size;
  MTLHeapType type;
  MTLStorageMode mode;
  std::mutex* mutex;
  std::map<NSUInteger, NSUInteger>* used;  // {offset: size} of buffers
}
@end
@implementation SimulatorHeap
- (void)dealloc {
  {
    const std::lock_guard<std::mutex> lock(all_heaps().mutex);
    all_heaps().live.erase((__bridge void*)self);
  }
  delete mutex;
  delete used;
  [super dealloc];
}
- (NSUInteger)size {
  return size;
}
- (NSUInteger)usedSize {
  const std::lock_guard<std::mutex> lock(*mutex);
  NSUInteger sum = 0;
  for (const auto& [offset, bytes] : *used) sum += bytes;
  return sum;
}
- (NSUInteger)currentAllocatedSize {
  return size;
}
- (MTLHeapType)type {
  return type;
}
- (MTLStorageMode)storageMode {
  return mode;
}
// {offset, size} of what is free.
- (std::vector<std::pair<NSUInteger, NSUInteger>>)holes:(NSUInteger)alignment {
  std::vector<std::pair<NSUInteger, NSUInteger>> result;
  NSUInteger begin = 0;
  const auto add = [&](NSUInteger end) {
    const NSUInteger first = aligned(begin, alignment);
    if (end > first) result.emplace_back(first, end - first);
  };
  for (const auto& [offset, bytes] : *used) {
    add(offset);
    begin = offset + bytes;
  }
  add(size);
  return result;
}
- (NSUInteger)maxAvailableSizeWithAlignment:(NSUInteger)alignment {
  const std::lock_guard<std::mutex> lock(*mutex);
  NSUInteger most = 0;
  for (const auto& [offset, bytes] : [self holes:alignment]) most = std::max(most, bytes);
  return most;
}
- (id<MTLBuffer>)make:(NSUInteger)length at:(NSUInteger)offset {
  (*used)[offset] = aligned(length, kHeapAlignment);
  return simulated_buffer(std::make_shared<simulator::Memory>(length), self, offset);
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (type != MTLHeapTypeAutomatic)
    simulator::fail("newBufferWithLength:options: of a heap for placement, which needs an offset");
  const std::lock_guard<std::mutex> lock(*mutex);
  for (const auto& [offset, bytes] : [self holes:kHeapAlignment])
    if (bytes >= length) return [self make:length at:offset];
  return nil;
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length
                             options:(MTLResourceOptions)options
                              offset:(NSUInteger)offset {
  if (type != MTLHeapTypePlacement)
    simulator::fail("newBufferWithLength:options:offset: of a heap that is not for placement");
  if (offset % kHeapAlignment != 0 || offset + length > size) {
    simulator::fail("newBufferWithLength:options:offset: offset " + std::to_string(offset) +
                    " is no multiple of " + std::to_string(kHeapAlignment) + ", or behind the heap's " +
                    std::to_string(size) + " bytes");
  }
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto next = used->lower_bound(offset);
  const bool meets_next = next != used->end() && next->first < offset + length;
  const bool meets_last = next != used->begin() && std::prev(next)->first + std::prev(next)->second > offset;
  if (meets_next || meets_last)
    simulator::fail(
        "newBufferWithLength:options:offset: another buffer lies there, and its memory is not simulated");
  return [self make:length at:offset];
}
@end

void simulated_give_back(id<MTLHeap> heap, NSUInteger offset) {
  const auto of = (SimulatorHeap*)heap;
  const std::lock_guard<std::mutex> lock(*of->mutex);
  of->used->erase(offset);
}

bool simulated_is_heap(const void* object) {
  const std::lock_guard<std::mutex> lock(all_heaps().mutex);
  return all_heaps().live.count(object) > 0;
}

id<MTLHeap> simulated_new_heap(MTLHeapDescriptor* descriptor) {
  if (!descriptor || descriptor.size == 0)
    simulator::fail("newHeapWithDescriptor: needs a descriptor with a size");
  SimulatorHeap* made = [SimulatorHeap new];
  made->size = descriptor.size;
  made->type = descriptor.type;
  made->mode = descriptor.storageMode;
  made->mutex = new std::mutex;
  made->used = new std::map<NSUInteger, NSUInteger>;
  const std::lock_guard<std::mutex> lock(all_heaps().mutex);
  all_heaps().live.insert((__bridge void*)made);
  return made;
}
