// Torch's allocator for mps, as far as programs notice it. What is freed is given out again at once, with
// what is in it, although commands that were encoded before may still read it: they run before those to come.
// Metal finds the room in a heap; from torch 2.14 on torch does, in heaps for placement: here the first.
#include "torch_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

#include "../metal/metal.h"
#include "../metal/runtime.h"
#include "device.h"
#include "torch.h"

namespace simulator::torch_memory {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSmall = 1 * kMiB;    // the largest of a small heap
constexpr size_t kMiddle = 10 * kMiB;  // below it a heap of the middle size
constexpr size_t kSmallHeap = 8 * kMiB, kMiddleHeap = 32 * kMiB, kLargeHeap = 1024 * kMiB;
constexpr size_t kRound = 2 * kMiB;        // of a heap with one buffer
constexpr double kLow = 1.4, kMost = 1.7;  // of the recommended size: garbage is collected, and an error

constexpr size_t kNowhere = SIZE_MAX;
constexpr MTLResourceOptions kShared = MTLResourceStorageModeShared;

MTLSizeAndAlign size_and_align(size_t bytes) {
  return [simulated_device() heapBufferSizeAndAlignWithLength:bytes options:kShared];
}

class Heap {
 public:
  explicit Heap(size_t size) {
    const AsTorch as_torch;
    MTLHeapDescriptor* descriptor = [MTLHeapDescriptor new];
    descriptor.size = size;
    descriptor.storageMode = MTLStorageModeShared;
    descriptor.type = torch_minor() >= 14 ? MTLHeapTypePlacement : MTLHeapTypeAutomatic;
    heap_ = [simulated_device() newHeapWithDescriptor:descriptor];
    [descriptor release];
  }
  ~Heap() { [heap_ release]; }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  size_t size() const { return [heap_ size]; }
  size_t available() const { return [heap_ size] - [heap_ usedSize]; }
  bool has_room(size_t size) const {
    if (is_placed()) return place_of(size) != kNowhere;
    return [heap_ maxAvailableSizeWithAlignment:size_and_align(size).align] >= size;
  }
  void* make(size_t size) {
    const AsTorch as_torch;
    ++buffers;
    if (!is_placed()) return (void*)[heap_ newBufferWithLength:size options:kShared];
    const size_t place = place_of(size);
    used_[place] = size;
    return (void*)[heap_ newBufferWithLength:size options:kShared offset:place];
  }
  void give_back(void* buffer) {
    used_.erase([(id<MTLBuffer>)buffer heapOffset]);
    --buffers;
    buffer_release(buffer);
  }

  size_t buffers = 0;

 private:
  bool is_placed() const { return [heap_ type] == MTLHeapTypePlacement; }
  size_t place_of(size_t size) const {
    size_t place = 0;
    for (const auto& [offset, bytes] : used_) {
      if (offset >= place + size) return place;
      place = offset + bytes;
    }
    return place + size <= [heap_ size] ? place : kNowhere;
  }

  id<MTLHeap> heap_;
  std::map<size_t, size_t> used_;  // {offset: size}, where torch places buffers
};

struct Block {
  void* const buffer;
  const size_t size;
  const bool is_small;
  Heap& heap;
};

struct Pool {
  std::multimap<size_t, Block*> free;  // by size
  std::map<Heap*, std::unique_ptr<Heap>> heaps;
};

struct State {
  std::recursive_mutex mutex;
  Pool small, large;
  std::map<const void*, std::unique_ptr<Block>> blocks;
  Bytes bytes;
};
State& state() {
  static State& instance = *new State;
  return instance;
}

Pool& pool_of(const Block& block) {
  return block.is_small ? state().small : state().large;
}

// Whether commands that have not run need a buffer.
bool is_busy(const Block& block) {
  return buffer_memory(block.buffer).use_count() > 2;  // its own, and this one
}

// The heap goes with its last buffer, if `and_heap`.
void release(Block& block, bool and_heap) {
  State& s = state();
  Pool& pool = pool_of(block);
  const auto [first, last] = pool.free.equal_range(block.size);
  pool.free.erase(std::find_if(first, last, [&](const auto& each) { return each.second == &block; }));
  Heap& heap = block.heap;
  s.bytes.free -= block.size;
  heap.give_back(block.buffer);
  s.blocks.erase(block.buffer);
  if (heap.buffers > 0 || !and_heap) return;
  s.bytes.heaps -= heap.size();
  pool.heaps.erase(&heap);
}

void release_free(Pool& pool) {
  while (!pool.free.empty()) release(*pool.free.begin()->second, true);
  for (auto each = pool.heaps.begin(); each != pool.heaps.end();) {
    const bool is_empty = each->second->buffers == 0;
    if (is_empty) state().bytes.heaps -= each->second->size();
    each = is_empty ? pool.heaps.erase(each) : std::next(each);
  }
}

// The fullest heap with so much room; null where there is none.
Heap* room(const Pool& pool, size_t size) {
  Heap* found = nullptr;
  for (const auto& [heap, owned] : pool.heaps) {
    if (heap->has_room(size) && (found == nullptr || heap->available() < found->available())) found = heap;
  }
  return found;
}

size_t heap_size(size_t size, bool has_pressure) {
  if (size <= kSmall) return kSmallHeap;
  if (size < kMiddle) return kMiddleHeap;
  if (size < kLargeHeap / 2 && !has_pressure) return kLargeHeap;
  return (size + kRound - 1) / kRound * kRound;
}

size_t most() {
  return static_cast<size_t>(kMost * static_cast<double>(state().bytes.recommended));
}

// Of all that the process has of Metal.
size_t driver_bytes() {
  const Bytes& bytes = state().bytes;
  return live_bytes() - bytes.in_use - bytes.free + bytes.heaps;
}

bool is_over(double ratio) {
  return static_cast<double>(driver_bytes()) >= ratio * static_cast<double>(state().bytes.recommended);
}

// A free block that fits, taken out.
Block* recycled(Pool& pool, size_t size, bool has_pressure) {
  State& s = state();
  const auto found = pool.free.lower_bound(size);
  if (found == pool.free.end() || driver_bytes() + size > most()) return nullptr;
  Block& block = *found->second;
  if (block.size > size + kMiddleHeap) {  // it is too large for that, if anything else is left
    if (room(pool, size) != nullptr) return nullptr;
    if (!is_busy(block) || has_pressure) {
      release(block, is_busy(block));
      return nullptr;
    }
  }
  pool.free.erase(found);
  s.bytes.free -= block.size;
  return &block;
}

Block* made(Pool& pool, size_t size, bool has_pressure) {
  State& s = state();
  if (driver_bytes() + size > most()) return nullptr;
  Heap* heap = room(pool, size);
  if (heap == nullptr) {
    auto owned = std::make_unique<Heap>(heap_size(size, has_pressure));
    heap = owned.get();
    pool.heaps[heap] = std::move(owned);
    s.bytes.heaps += heap->size();
  }
  void* buffer = heap->make(size);
  auto& block = s.blocks[buffer];
  block = std::make_unique<Block>(Block{buffer, size, &pool == &s.small, *heap});
  return block.get();
}

// Where the low watermark is reached: what is free and that no command needs.
void collect(Pool& pool) {
  for (auto each = pool.free.begin(); each != pool.free.end() && is_over(kLow);) {
    Block& block = *(each++)->second;
    if (!is_busy(block)) release(block, true);
  }
}

std::string text_of(size_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (bytes < 1024) {
    text << bytes << " bytes";
  } else if (bytes < kMiB) {
    text << static_cast<double>(bytes) / 1024 << " KiB";
  } else if (bytes < 1024 * kMiB) {
    text << static_cast<double>(bytes) / kMiB << " MiB";
  } else {
    text << static_cast<double>(bytes) / (1024.0 * kMiB) << " GiB";
  }
  return text.str();
}

}  // namespace

void* allocate(size_t bytes) {
  State& s = state();
  std::unique_lock<std::recursive_mutex> lock(s.mutex);
  if (s.bytes.recommended == 0) return nullptr;
  TORCH_CHECK(bytes < s.bytes.recommended, "Invalid buffer size: ", text_of(bytes));
  const size_t size = size_and_align(bytes).size;
  Pool& pool = size <= kSmall ? s.small : s.large;
  const bool has_pressure = &pool == &s.large && is_over(kLow);
  Block* block = recycled(pool, size, has_pressure);
  if (block == nullptr && has_pressure) collect(pool);
  if (block == nullptr) block = made(pool, size, has_pressure);
  if (block == nullptr) {
    lock.unlock();
    synchronize_host();
    lock.lock();
    release_free();
    block = made(pool, size, has_pressure);
  }
  if (block == nullptr) {
    const size_t others = driver_bytes() - s.bytes.heaps;
    TORCH_CHECK(false, "MPS backend out of memory (MPS allocated: ", text_of(s.bytes.heaps),
                ", other allocations: ", text_of(others), ", max allowed: ", text_of(most()),
                "). Tried to allocate ", text_of(size),
                " on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
                "allocations (may cause system failure).");
  }
  s.bytes.in_use += block->size;
  return block->buffer;
}

bool give_back(void* buffer) {
  State& s = state();
  const std::lock_guard<std::recursive_mutex> lock(s.mutex);
  const auto found = s.blocks.find(buffer);
  if (found == s.blocks.end()) return false;
  Block& block = *found->second;
  s.bytes.in_use -= block.size;
  s.bytes.free += block.size;
  pool_of(block).free.emplace(block.size, &block);
  if (s.bytes.recommended == 0) release(block, true);
  return true;
}

void release_free() {
  const std::lock_guard<std::recursive_mutex> lock(state().mutex);
  release_free(state().small);
  release_free(state().large);
}

Bytes current_bytes() {
  const std::lock_guard<std::recursive_mutex> lock(state().mutex);
  return state().bytes;
}

size_t free_buffers() {
  const std::lock_guard<std::recursive_mutex> lock(state().mutex);
  return state().small.free.size() + state().large.free.size();
}

size_t heaps() {
  const std::lock_guard<std::recursive_mutex> lock(state().mutex);
  return state().small.heaps.size() + state().large.heaps.size();
}

}  // namespace simulator::torch_memory

size_t simulator::recommended_bytes() {
  const size_t recommended = torch_memory::current_bytes().recommended;
  return recommended == 0 ? size_t{64} << 30 : recommended;
}

// Memory is torch's from here on, of a GPU with this recommended size; 0 is no longer.
extern "C" __attribute__((visibility("default"))) void simulator_pool_memory(size_t recommended) {
  {
    const std::lock_guard<std::recursive_mutex> lock(simulator::torch_memory::state().mutex);
    simulator::torch_memory::state().bytes.recommended = recommended;
  }
  if (recommended == 0) simulator::torch_memory::release_free();
}
