// MTLSharedEvent: a number that the GPU and the host raise, and for which both wait.
#import <Metal/Metal.h>

#include <Block.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "foundation.h"
#include "metal.h"
#include "runtime.h"

using simulator::fail;

namespace {

// Seconds of the real clock that the GPU waits for a signal. On a Mac it would wait until macOS stops it.
constexpr double kLimit = 20;
constexpr size_t kRemembered = 1024;  // signals of an event
std::atomic<double> limit{kLimit};

struct Event {
  struct Signal {
    uint64_t value;
    double time;  // by the GPU's clock
  };
  struct Listener {
    uint64_t value;
    std::function<void(double time)> call;
  };

  std::mutex mutex;
  std::condition_variable changed;
  uint64_t value = 0;
  uint64_t ran = 0;             // number of the last command before a signal of the GPU's
  std::vector<Signal> signals;  // ascending
  std::vector<Listener> listeners;

  // A signal of the GPU's raises the value, if it is larger; the host sets it.
  void set(uint64_t to, double time, bool raises) {
    std::vector<std::function<void()>> blocks;
    const uint64_t run = raises ? simulator::last_run() : 0;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (raises && to <= value) return;
      value = to;
      ran = std::max(ran, run);
      if (signals.size() == kRemembered) signals.erase(signals.begin(), signals.begin() + kRemembered / 2);
      signals.push_back({to, time});
      const auto waits = [&](const Listener& listener) { return listener.value > to; };
      const auto reached = std::stable_partition(listeners.begin(), listeners.end(), waits);
      for (auto each = reached; each != listeners.end(); ++each)
        blocks.push_back([call = std::move(each->call), time, run] {
          simulator::host_hears(run);
          call(time);
        });
      listeners.erase(reached, listeners.end());
      changed.notify_all();
    }
    simulator::event_changed();
    if (!blocks.empty()) simulator::tell_listeners(std::move(blocks));
  }

  // When a value was reached; the GPU waits for it. Under the mutex.
  double time_of(uint64_t reached) const {
    const auto first = std::find_if(signals.begin(), signals.end(),
                                    [&](const Signal& signal) { return signal.value >= reached; });
    return first == signals.end() ? 0 : first->time;
  }

  bool has_reached(uint64_t wanted) {
    const std::lock_guard<std::mutex> lock(mutex);
    return value >= wanted;
  }

  // Whether the value is reached in time.
  bool wait(uint64_t wanted, double seconds) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return value >= wanted; });
  }
};

}  // namespace

@implementation MTLSharedEventListener
@end

@interface SimulatorSharedEvent : NSObject <MTLSharedEvent> {
 @public
  std::shared_ptr<Event>* event;
}
@end
@implementation SimulatorSharedEvent
- (void)dealloc {
  delete event;
  [super dealloc];
}
- (uint64_t)signaledValue {
  std::unique_lock<std::mutex> lock((*event)->mutex);
  const uint64_t value = (*event)->value, ran = (*event)->ran;
  lock.unlock();
  simulator::host_hears(ran);
  return value;
}
- (void)setSignaledValue:(uint64_t)value {
  (*event)->set(value, simulator::answer_clock(), false);
}
- (void)notifyListener:(MTLSharedEventListener*)listener
               atValue:(uint64_t)value
                 block:(MTLSharedEventNotificationBlock)block {
  if (!listener) fail("notifyListener: the listener is nil, and nobody would be told");
  MTLSharedEventNotificationBlock kept = Block_copy(block);
  [self retain];
  const auto call = [self, kept, value](double time) {
    simulator::answer_hears(time);
    @autoreleasepool {
      kept(self, value);
    }
    Block_release(kept);
    [self release];
  };
  double time = 0;
  uint64_t ran = 0;
  {
    const std::lock_guard<std::mutex> lock((*event)->mutex);
    if ((*event)->value < value) return (*event)->listeners.push_back({value, call});
    time = (*event)->time_of(value);
    ran = (*event)->ran;
  }
  simulator::tell_listeners({[call, time, ran] {
    simulator::host_hears(ran);
    call(time);
  }});
}
- (BOOL)waitUntilSignaledValue:(uint64_t)value timeoutMS:(uint64_t)milliseconds {
  if (!(*event)->wait(value, static_cast<double>(milliseconds) / 1000)) return NO;
  std::unique_lock<std::mutex> lock((*event)->mutex);
  const uint64_t ran = (*event)->ran;
  const double time = (*event)->time_of(value);
  lock.unlock();
  simulator::host_hears(ran);
  simulator::answer_hears(time);
  return YES;
}
@end

id<MTLSharedEvent> simulated_shared_event() {
  SimulatorSharedEvent* made = [SimulatorSharedEvent new];
  made->event = new std::shared_ptr<Event>(std::make_shared<Event>());
  return made;
}

namespace {

std::shared_ptr<Event> event_of(const char* method, id<MTLEvent> event, const simulator::Encoding& into) {
  if (!event) fail(std::string(method) + ": the event is nil");
  if (into.encoder)
    fail(std::string(method) + ":value: with uncommitted encoder; call stream->endKernelCoalescing() before");
  if (simulator::is_of_torch(into) && simulator::current_block() == 0)
    fail(std::string(method) + ": is called outside of a block of the stream's queue");
  return *((SimulatorSharedEvent*)event)->event;
}

}  // namespace

void simulated_signal(id<MTLEvent> event, uint64_t value, simulator::Encoding& into) {
  const std::shared_ptr<Event> signalled = event_of("encodeSignalEvent", event, into);
  const auto act = [signalled, value] {
    signalled->set(value, simulator::gpu_clock(), true);
    return true;
  };
  simulator::record_event("signal event", act, nullptr, into);
}

void simulated_wait(id<MTLEvent> event, uint64_t value, simulator::Encoding& into) {
  const std::shared_ptr<Event> awaited = event_of("encodeWaitForEvent", event, into);
  const std::string line = simulator::dropping() ? "" : simulator::python_line();
  const auto act = [awaited, value, line] {
    if (!awaited->has_reached(value)) simulator::tell_failed();
    if (!awaited->has_reached(value)) {
      if (!awaited->wait(value, limit)) {
        simulator::report(line + ": the GPU waits for the value " + std::to_string(value) +
                          " of an event, and nobody signals it; it has " + std::to_string(awaited->value));
        return false;
      }
    }
    std::unique_lock<std::mutex> lock(awaited->mutex);
    const double time = awaited->time_of(value);
    lock.unlock();
    simulator::gpu_hears(time);
    return true;
  };
  const auto waits = [awaited, value] { return !awaited->has_reached(value); };
  simulator::record_event("wait for event", act, waits, into);
}

double simulator::longest_wait() {
  return limit;
}

extern "C" void simulator_limit_waits(double seconds) {
  limit = seconds > 0 ? seconds : kLimit;
}
