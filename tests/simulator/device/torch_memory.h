// How torch keeps Metal's memory: in heaps, of which it gives out what was freed.
#pragma once
#include <cstddef>

namespace simulator::torch_memory {

// A buffer of a heap; null while torch's allocator is not simulated.
void* allocate(size_t bytes);
// Whether a buffer was of a heap, which has it again.
bool give_back(void* buffer);
// Frees heaps in which nothing is in use. The GPU has ended.
void release_free();

struct Bytes {
  size_t in_use = 0, free = 0, heaps = 0;
  size_t recommended = 0;  // 0 while it is not simulated
};
Bytes current_bytes();

}  // namespace simulator::torch_memory
