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
constexpr size_t kAlignment = 4096;  // a page: the host's reads are guarded

std::atomic<uint64_t> next_identity{1};
std::atomic<size_t> buffers{0}, bytes_alive{0};

size_t round_up(size_t bytes) {
  return (bytes + kAlignment) / kAlignment * kAlignment;
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
namespace {

struct Guards {
  std::mutex mutex;
  std::unordered_set<Memory*> taken;
  bool runs = false, at_event = false;
  uint64_t last = 0, heard = 0;
};
Guards& guards() {
  static Guards& instance = *new Guards;
  return instance;
}

// Under the mutex.
void close_or_open(Memory& memory) {
  const Guards& now = guards();
  const bool is_unread = (memory.unwritten > 0 && !now.at_event) || memory.written > now.heard;
  if (is_unread && !now.runs && !dropping()) return memory.taken->close();
  memory.taken->open();
  if (!memory.taken->was_read()) return;
  report(
      memory.taken->line +
      ": the host reads or writes memory that a command of the GPU writes, before it has heard of its end: "
      "wait for a signal behind it, or for its command buffer");
}

void close_or_open_all() {
  for (Memory* memory : guards().taken) close_or_open(*memory);
}

void take(Memory& memory) {
  const std::string line = python_line();
  const std::lock_guard<std::mutex> lock(guards().mutex);
  if (!memory.taken) {
    memory.taken =
        std::make_unique<Poison>(memory.data, (memory.size + kAlignment - 1) / kAlignment * kAlignment);
    guards().taken.insert(&memory);
  }
  memory.taken->line = line;
  close_or_open(memory);
}

}  // namespace

void gpu_runs() {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  guards().runs = true;
  guards().at_event = false;
  close_or_open_all();
}

void gpu_stops(bool at_event) {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  guards().runs = false;
  guards().at_event = at_event;
  close_or_open_all();
}

uint64_t last_run() {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  return guards().last;
}

void host_hears(uint64_t number) {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  if (number <= guards().heard) return;
  guards().heard = number;
  close_or_open_all();
}

void Writes::add(const std::shared_ptr<Memory>& memory) {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  written_.push_back(memory);
  ++memory->unwritten;
  if (memory->taken) close_or_open(*memory);
}

void Writes::run() {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  ++guards().last;
  for (const auto& memory : written_) memory->written = guards().last;
}

Writes::~Writes() {
  const std::lock_guard<std::mutex> lock(guards().mutex);
  for (const auto& memory : written_) {
    --memory->unwritten;
    if (memory->taken) close_or_open(*memory);
  }
}

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
    data = static_cast<char*>(aligned_alloc(kAlignment, round_up(bytes)));
    if (!data) throw std::bad_alloc();
    fill(data, bytes, zeros ? 0 : kUnwritten);
  }
  bytes_alive += size;
}

Memory::~Memory() {
  if (taken) {
    const std::lock_guard<std::mutex> lock(guards().mutex);
    guards().taken.erase(this);
    taken->open();
  }
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
}
@end
@implementation SimulatorBuffer
- (id<MTLHeap>)heap {
  return heap;
}
- (void*)contents {
  simulator::take(**memory);
  return (*memory)->data;
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
  delete memory;
  [super dealloc];
}
@end

namespace simulator {

void* buffer_new(size_t bytes) {
  auto memory = std::make_shared<Memory>(bytes);
  SimulatorBuffer* buffer = [SimulatorBuffer new];
  buffer->memory = new std::shared_ptr<Memory>(std::move(memory));
  buffer->heap = simulated_heap(bytes);
  buffers++;
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().live.insert((void*)buffer);
  return (void*)buffer;
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
