// MTLBuffer: memory that shows when it is read before it is written, and that lives as long as a recorded
// command needs it.
#import <Metal/Metal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_set>

#include "metal.h"
#include "runtime.h"

namespace {

// Larger buffers are mapped, so that a stack of experts over 4 GiB costs only the pages that are touched.
constexpr size_t kMapBytes = size_t{1} << 20;
// Larger ones are left to the kernel's zero pages.
constexpr size_t kFillBytes = size_t{64} << 20;
// Address space behind a mapped buffer: running off its end ends in no other.
constexpr size_t kGuardBytes = size_t{1} << 30;
// NaN in float32, float16 and bfloat16, and an id far out of range in int32.
constexpr uint16_t kUnwritten = 0x7fe1;
constexpr uint16_t kFreed = 0x7fd3;

std::atomic<uint64_t> next_identity{1};
std::atomic<size_t> buffers{0}, bytes_alive{0};

size_t round_up(size_t bytes) {
  return (bytes + simulator::kPage) / simulator::kPage * simulator::kPage;  // its own: they are guarded
}

void fill(char* data, size_t bytes, uint16_t pattern) {
  memcpy(data, &pattern, std::min(bytes, sizeof(pattern)));
  for (size_t done = sizeof(pattern); done < bytes; done *= 2)
    memcpy(data + done, data, std::min(done, bytes - done));
}

struct Registry {
  std::mutex mutex;
  std::unordered_set<const void*> live;
};
Registry& registry() {
  static Registry* instance = new Registry;  // never destroyed: tensors may outlive static destruction
  return *instance;
}

}  // namespace

namespace simulator {

Memory::Memory(size_t bytes) : size(bytes), identity(next_identity++) {
  const bool zeros = dropping();  // nothing will write the values that the host reads
  if (bytes >= kMapBytes) {
    void* mapped =
        mmap(nullptr, bytes + kGuardBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    if (mprotect(mapped, bytes, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    data = static_cast<char*>(mapped);
    if (bytes < kFillBytes && !zeros) fill(data, bytes, kUnwritten);
  } else {
    data = static_cast<char*>(aligned_alloc(simulator::kPage, round_up(bytes)));
    if (!data) throw std::bad_alloc();
    fill(data, bytes, zeros ? 0 : kUnwritten);
  }
  bytes_alive += size;
}

Memory::Memory(char* bytes, size_t count, std::function<void()> given_back)
    : data(bytes), size(count), identity(next_identity++), release(std::move(given_back)) {}

Memory::~Memory() {
  if (release) {
    release();
    return;
  }
  guarded.reset();
  bytes_alive -= size;
  if (size >= kMapBytes) {
    munmap(data, size + kGuardBytes);
  } else {
    if (!dropping()) fill(data, size, kFreed);
    free(data);
  }
}

size_t live_buffers() {
  return buffers;
}
size_t live_bytes() {
  return bytes_alive;
}

}  // namespace simulator

@interface SimulatorBuffer : NSObject <MTLBuffer> {
 @public
  std::shared_ptr<simulator::Memory>* memory;
  id<MTLHeap> heap;
  NSUInteger offset;
}
@end
@implementation SimulatorBuffer
- (id<MTLHeap>)heap {
  return heap;
}
- (NSUInteger)heapOffset {
  return offset;
}
- (MTLStorageMode)storageMode {
  return heap ? [heap storageMode] : MTLStorageModeShared;
}
- (void*)contents {
  if ([self storageMode] == MTLStorageModePrivate) return nullptr;
  return simulator::contents_for_host(**memory);
}
- (NSUInteger)length {
  return (*memory)->size;
}
- (void)dealloc {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().live.erase((void*)self);
  }
  buffers--;
  if ((*memory)->lent > 0)
    simulator::report("a buffer is released before the end of a command buffer that does not retain it");
  delete memory;
  if (heap) {
    simulated_give_back(heap, offset);
    [heap release];
  }
  [super dealloc];
}
@end

namespace simulator {

void* buffer_new(size_t bytes) {
  const AsTorch as_torch;
  id<MTLHeap> heap = simulated_heap(bytes);
  if (heap) return (void*)[heap newBufferWithLength:bytes options:MTLResourceStorageModeShared];
  return (void*)[simulated_device() newBufferWithLength:bytes options:MTLResourceStorageModeShared];
}

void buffer_release(void* buffer) {
  [(SimulatorBuffer*)buffer release];
}

void* buffer_contents(const void* buffer) {
  return (*((SimulatorBuffer*)buffer)->memory)->data;
}

std::shared_ptr<Memory> buffer_memory(const void* buffer) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().live.count(buffer) ? *((SimulatorBuffer*)buffer)->memory : nullptr;
}

}  // namespace simulator

id<MTLBuffer> simulated_buffer(std::shared_ptr<simulator::Memory> memory, id<MTLHeap> heap,
                               NSUInteger offset) {
  SimulatorBuffer* made = [SimulatorBuffer new];
  made->memory = new std::shared_ptr<simulator::Memory>(std::move(memory));
  made->heap = [heap retain];
  made->offset = offset;
  buffers++;
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().live.insert((void*)made);
  return made;
}
