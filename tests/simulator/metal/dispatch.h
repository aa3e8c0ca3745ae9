// Which block of which queue the current thread is in.
#pragma once
#include <cstdint>

namespace simulator {
// A number that no other dispatch_sync block of the process has; 0 outside of any block.
uint64_t current_block();
// Whether the thread is in a block of this queue.
bool in_block_of(const void* queue);

// Raises a finding in a second thread that uses the device, while one thread alone may.
void use_device();
// The device side releases Python's lock while a thread waits for a queue; otherwise no other thread could
// finish.
class WaitForQueue {
 public:
  WaitForQueue();
  ~WaitForQueue();

 private:
  void* state_;
};
}  // namespace simulator
