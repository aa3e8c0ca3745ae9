// Serial queues: a queue is a lock, and a block runs on the thread that submits it, as dispatch_sync's blocks
// do.
#import <Foundation/Foundation.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "foundation.h"
#include "runtime.h"

@protocol OS_dispatch_queue <NSObject>
@end
@interface SimulatorQueue : NSObject <OS_dispatch_queue> {
 @public
  std::mutex* mutex;
  std::string* label;
}
@end
@implementation SimulatorQueue
- (void)dealloc {
  delete mutex;
  delete label;
  [super dealloc];
}
@end

namespace {

struct Block {
  SimulatorQueue* queue;
  uint64_t number;
};
thread_local std::vector<Block> blocks;

class Enter {
 public:
  explicit Enter(SimulatorQueue* queue) {
    simulator::use_device();
    static std::atomic<uint64_t> next{1};
    if (simulator::in_block_of((void*)queue)) {
      simulator::fail("dispatch_sync on queue '" + *queue->label +
                      "' inside a block of that queue: on macOS this waits forever");
    }
    lock_ = std::unique_lock<std::mutex>(*queue->mutex, std::try_to_lock);
    if (!lock_) {  // whoever has it may need Python's lock
      simulator::WaitForQueue waiting;
      lock_.lock();
    }
    blocks.push_back({queue, next++});
    pools_ = simulator::pool_depth();
  }
  ~Enter() {
    simulator::drain_pools(pools_);
    blocks.pop_back();
  }

 private:
  std::unique_lock<std::mutex> lock_;
  size_t pools_;
};

}  // namespace

namespace {
std::mutex user_mutex;
bool has_one_user = false;
std::thread::id user;  // the first thread since
}  // namespace

extern "C" __attribute__((visibility("default"))) void simulator_one_thread(int on) {
  const std::lock_guard<std::mutex> lock(user_mutex);
  has_one_user = on != 0;
  user = std::thread::id();
}

void simulator::use_device() {
  {
    const std::lock_guard<std::mutex> lock(user_mutex);
    if (!has_one_user) return;
    if (user == std::thread::id()) user = std::this_thread::get_id();
    if (user == std::this_thread::get_id()) return;
  }
  fail("a second thread uses the device, which one thread alone may");
}

bool simulator::in_block_of(const void* queue) {
  for (const Block& block : blocks) {
    if ((void*)block.queue == queue) return true;
  }
  return false;
}

uint64_t simulator::current_block() {
  return blocks.empty() ? 0 : blocks.back().number;
}

dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t attributes) {
  if (attributes != DISPATCH_QUEUE_SERIAL)
    simulator::fail("dispatch_queue_create: only serial queues are simulated");
  SimulatorQueue* queue = [SimulatorQueue new];
  queue->mutex = new std::mutex;
  queue->label = new std::string(label ? label : "");
  return (dispatch_queue_t)queue;
}

void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  Enter enter((SimulatorQueue*)queue);
  try {
    block();
  } catch (const std::exception& error) {
    simulator::fail(
        std::string("a C++ exception leaves a dispatch_sync block, which ends the process on macOS; use "
                    "at::mps::dispatch_sync_with_rethrow: ") +
        error.what());
  }
}
