// Slots of experts whose weights are read from a disk: the GPU asks a pool of the host's where the experts of
// a layer lie, and goes on once it has been told.
//
// The queue is not drained: the GPU signals an event behind the ids, and waits for the next value of it. In
// between Metal's own queue asks the pool, which answers there if all experts are in memory, else from a
// thread that reads (slots/pool.h). Python takes no part. All tensors of torch's on Apple silicon lie in
// memory that the host reads and writes.
//
// macOS ends a command buffer that has waited and worked for some 5 s: each wait has a buffer of its own, and
// an answer that takes kLimit is given up.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#import <Metal/Metal.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "metal/faults.h"
#include "metal/function.h"
#include "register.h"
#include "slots/keep_warm.h"
#include "slots/numbers.h"

namespace moe_mps {
namespace {

using at::Tensor;
using SteadyClock = std::chrono::steady_clock;

// The pool in which every expert lies in the slot of its own number.
constexpr int64_t kResident = 0;
constexpr double kLimit = 3.5;  // seconds
// Command buffers that wait one after the other, for whom the host waits before it commits one more. Should
// macOS count the 5 s from the commit, each still has more than a second. With a host that hears of an end
// 150 us late, two leave the GPU idle for 1 % of a token, and three or 32 do not (measured.streamed).
constexpr size_t kMostBuffers = 4;
// Of those who measure what macOS counts. A queue of Metal's holds 64 buffers, by default as in torch: for
// one more, whoever commits waits in the stream's queue.
constexpr size_t kMostMeasured = 32;
// An id that is no expert, and the largest that a pool gets.
constexpr int64_t kNone = -1, kMostId = INT32_MAX;

SteadyClock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(seconds));
}

// What answers requests: a pool, or the ids themselves, after so many seconds for those who measure that.
struct PoolEntry {
  std::string name;
  double limit;              // seconds
  std::string file;          // that it reads; may be empty
  std::weak_ptr<Pool> pool;  // Python's; requests keep it
  double seconds = 0;
  at::mps::MPSStream* stream = nullptr;  // that has asked last
};

// An event of a stream, whose values only rise.
struct Event {
  id<MTLSharedEvent> shared = nil;
  uint64_t value = 0;  // the last that the GPU waits for
};

// Elements of a tensor in memory that the host reads and writes.
struct Elements {
  c10::Storage storage;  // kept
  char* bytes;
  c10::ScalarType dtype;
  int64_t count;

  explicit Elements(const Tensor& tensor)
      : storage(tensor.storage()), dtype(tensor.scalar_type()), count(tensor.numel()) {
    const id<MTLBuffer> buffer = __builtin_bit_cast(id<MTLBuffer>, storage.data());
    bytes = static_cast<char*>([buffer contents]);
    TORCH_CHECK(bytes != nullptr, "moe_mps: torch's memory on this GPU is not shared with the host");
    bytes += tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  }
  int64_t expert(int64_t place) const {
    return dtype == at::kInt ? reinterpret_cast<const int32_t*>(bytes)[place]
                             : reinterpret_cast<const int64_t*>(bytes)[place];
  }
};

struct Request {
  std::shared_ptr<PoolEntry> entry;
  std::shared_ptr<Pool> pool;  // null where the ids are the answer. A model may be freed meanwhile
  Elements ids, slots;
  Event event;  // the GPU waits for its value
  at::mps::MPSStream* stream;
  int64_t buffer;  // number of the command buffer
  bool is_ready = false;
  std::function<void()> abandon;  // the pool
  SteadyClock::time_point due = SteadyClock::time_point::max();
};

using Requests = std::map<int64_t, Request>;

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, std::shared_ptr<PoolEntry>> pools = {
      {kResident, std::make_shared<PoolEntry>(PoolEntry{"resident experts", kLimit, "", {}})}};
  std::map<at::mps::MPSStream*, Event> events;  // torch frees no stream
  Requests requests;                            // that the GPU waits for, or will wait for
  int64_t last = 0;
  MTLSharedEventListener* listener = nil;
  bool is_watched = false, is_closed = false;
};

State& state = *new State;  // Metal may tell of a signal while the process ends

// A fork has no GPU and none of the threads, one of which may hold the mutex.
void renew() {
  new (&state) State;
}
const int renewed = pthread_atfork(nullptr, nullptr, renew);

// Writes the slots of a request, zeros where they are null, and takes it out. Under the mutex.
Request answered(Requests::iterator found, const int32_t* slots) {
  Request request = std::move(found->second);
  state.requests.erase(found);
  if (request.is_ready && request.pool != nullptr) gpu_goes_on();
  auto* written = reinterpret_cast<int32_t*>(request.slots.bytes);
  if (slots == nullptr) {
    std::fill_n(written, request.slots.count, 0);
  } else {
    std::copy_n(slots, request.slots.count, written);
  }
  return request;
}

// Lets the GPU go on. Without the mutex, as Metal may tell of the signal at once.
void signal(const Request& request) {
  static std::recursive_mutex& one_at_a_time = *new std::recursive_mutex;
  const std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  @autoreleasepool {
    // Metal may tell of a later buffer that has failed first, and a value must not fall.
    const id<MTLSharedEvent> event = request.event.shared;
    if ([event signaledValue] < request.event.value) [event setSignaledValue:request.event.value];
  }
}

// The step that asked has failed: it ends where its tokens are read.
void fail(int64_t number, const std::string& why) {
  std::unique_lock<std::mutex> lock(state.mutex);
  const auto found = state.requests.find(number);
  if (found == state.requests.end()) return;  // it was late, and has failed
  report_fault(found->second.stream, found->second.buffer,
               c10::str("moe_mps: experts of ", found->second.entry->name, " cannot be read: ", why,
                        "; what was computed before this message is lost"));
  const Request request = answered(found, nullptr);
  lock.unlock();
  if (request.abandon) request.abandon();
  signal(request);
}

// Tells the GPU the slots. Nothing happens if it was late.
void answer(int64_t number, const std::vector<int32_t>& slots) {
  std::unique_lock<std::mutex> lock(state.mutex);
  const auto found = state.requests.find(number);
  if (found == state.requests.end()) return;
  const Request request = answered(found, slots.data());
  lock.unlock();
  signal(request);
}

// Ends requests whose pool is late. It sleeps until one is due.
void watch_requests() {
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    const auto earlier = [](const auto& a, const auto& b) { return a.second.due < b.second.due; };
    const auto first = std::min_element(state.requests.begin(), state.requests.end(), earlier);
    if (first == state.requests.end() || !first->second.is_ready) {
      state.changed.wait(lock);
      continue;
    }
    const int64_t number = first->first;
    const SteadyClock::time_point due = first->second.due;
    if (SteadyClock::now() < due) {
      state.changed.wait_until(lock, due);
      continue;
    }
    const std::shared_ptr<PoolEntry> pool = first->second.entry;
    lock.unlock();
    fail(number,
         c10::str(pool->file.empty() ? "the pool" : "the disk of " + pool->file, " has not answered within ",
                  pool->limit, " s, and macOS stops a GPU that waits longer"));
    lock.lock();
  }
}

// Requests that fit, answered with zeros. Under the mutex.
template <typename Fits>
std::deque<Request> given_up(Fits fits) {
  std::deque<Request> requests;
  for (auto each = state.requests.begin(); each != state.requests.end();) {
    const auto next = std::next(each);
    if (fits(each->second)) requests.push_back(answered(each, nullptr));
    each = next;
  }
  return requests;
}

// The ids of a request are there; or they never will be, because its buffer has failed, or one before it.
void on_ids_ready(int64_t number, bool has_failed) {
  const bool is_lost = has_failed || has_fault();  // ids of a step that has failed may be anything
  std::unique_lock<std::mutex> lock(state.mutex);
  const auto found = state.requests.find(number);
  if (found == state.requests.end() || found->second.is_ready) return;
  if (is_lost || state.is_closed) {
    const Event event = found->second.event;
    const std::deque<Request> requests = given_up([&event](const Request& each) {
      return each.event.shared == event.shared && each.event.value <= event.value;
    });
    lock.unlock();
    for (const Request& request : requests) signal(request);
    return;
  }
  found->second.is_ready = true;
  const std::shared_ptr<PoolEntry> entry = found->second.entry;
  const std::shared_ptr<Pool> pool = found->second.pool;
  if (pool != nullptr) gpu_waits();
  found->second.due = SteadyClock::now() + as_duration(entry->limit);
  std::vector<int64_t> ids(static_cast<size_t>(found->second.ids.count));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = std::clamp(found->second.ids.expert(static_cast<int64_t>(i)), kNone, kMostId);
  state.changed.notify_all();
  lock.unlock();

  if (pool == nullptr) {
    const auto tell = [number, slots = std::vector<int32_t>(ids.begin(), ids.end())] {
      answer(number, slots);
    };
    if (entry->seconds == 0) return tell();
    try {
      std::thread([tell, seconds = entry->seconds] {
        std::this_thread::sleep_for(as_duration(seconds));
        tell();
      }).detach();
    } catch (const std::system_error& error) {  // it must not pass through Metal
      fail(number, c10::str("no thread can be made: ", error.code().message()));
    }
    return;
  }
  const std::shared_ptr<SlotRequest> slot_request =
      pool->ask(std::move(ids), [number](const ReadFault& fault, const std::vector<int32_t>& slots) {
        fault.why.empty() ? answer(number, slots) : fail(number, fault.why);
      });
  lock.lock();
  const auto waiting = state.requests.find(number);
  if (waiting != state.requests.end())
    waiting->second.abandon = [pool, slot_request] { pool->abandon(slot_request); };
}

// In a block of the stream's queue: signals behind what is encoded, gives that to the GPU, and waits in front
// of what comes.
void ask(at::mps::MPSStream* stream, const std::shared_ptr<PoolEntry>& entry,
         const std::shared_ptr<Pool>& pool, const Tensor& ids, const Tensor& slots) {
  const int64_t buffer = watch_work(stream).number;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (state.listener == nil) state.listener = [MTLSharedEventListener new];
  if (!state.is_watched) {
    std::thread(watch_requests).detach();  // may raise
    state.is_watched = true;
  }
  Event& event = state.events[stream];
  if (event.shared == nil) event.shared = [stream->device() newSharedEvent];
  const uint64_t asked = event.value + 1;
  event.value += 2;
  const int64_t number = ++state.last;
  entry->stream = stream;
  state.requests.emplace(number, Request{entry, pool, Elements(ids), Elements(slots), event, stream, buffer});
  const id<MTLSharedEvent> shared = event.shared;
  lock.unlock();

  stream->endKernelCoalescing();
  id<MTLCommandBuffer> encoded = [stream->commandBuffer() rootCommandBuffer];
  [encoded encodeSignalEvent:shared value:asked];
  [encoded addCompletedHandler:^(id<MTLCommandBuffer> done) {
    on_ids_ready(number, [done status] == MTLCommandBufferStatusError);
  }];
  [shared notifyListener:state.listener
                 atValue:asked
                   block:^(id<MTLSharedEvent>, uint64_t) {
                     on_ids_ready(number, false);
                   }];
  stream->synchronize(at::mps::SyncType::COMMIT);
  watch_work(stream).waits_for = true;
  [[stream->commandBuffer() rootCommandBuffer] encodeWaitForEvent:shared value:asked + 1];
}

// What has a number, its pool, which is null where there is none, and the stream that has asked it last.
// Raises for a number that is none.
std::tuple<std::shared_ptr<PoolEntry>, std::shared_ptr<Pool>, at::mps::MPSStream*> numbered(int64_t number) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.pools.find(number);
  TORCH_CHECK_VALUE(found != state.pools.end(),
                    "moe_mps::_expert_slots: pool must be the number of a pool of slots, got ", number);
  const std::shared_ptr<PoolEntry>& entry = found->second;
  std::shared_ptr<Pool> pool = entry->pool.lock();
  TORCH_CHECK_VALUE(pool != nullptr || number == kResident || entry->seconds > 0,
                    "moe_mps::_expert_slots: pool ", number, " was freed");
  return {entry, std::move(pool), entry->stream};
}

Tensor _expert_slots(const Tensor& ids_, int64_t number) {
  std::shared_ptr<PoolEntry> entry;
  std::shared_ptr<Pool> pool;
  at::mps::MPSStream* last;
  std::tie(entry, pool, last) = numbered(number);
  const Tensor ids = ids_.contiguous(), slots = at::empty(ids.sizes(), ids.options().dtype(at::kInt));
  if (ids.numel() == 0) return slots;
  raise_fault();
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  // What other streams read in the slots must be there until they have: the pool may give them to others.
  if (pool != nullptr && last != nullptr && last != stream) finish(last);
  if (pool != nullptr) prepare_keep_warm();
  wait_for_room(stream, entry->seconds > 0 ? kMostMeasured : kMostBuffers);
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      ask(stream, entry, pool, ids, slots);
    }
  });
  return slots;
}

// A number whose requests are answered with the ids after so many seconds.
void add_late_pool(int64_t number, double seconds) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.pools[number] = std::make_shared<PoolEntry>(PoolEntry{"a probe", 10 * seconds + 1, "", {}, seconds});
}

// From here on no pool is asked: the GPU goes on at once, whatever it computes.
void close_requests() {
  std::unique_lock<std::mutex> lock(state.mutex);
  state.is_closed = true;
  end_keep_warm();
  state.changed.notify_all();
  const std::deque<Request> requests = given_up([](const Request& each) { return each.is_ready; });
  lock.unlock();
  for (const Request& request : requests) signal(request);
}

// A tensor on the CPU with the same elements in the same memory, which it keeps.
Tensor host_view(const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_mps(), "moe_mps: only a tensor on mps has a view on the host, got ",
                    tensor.device());
  const at::TensorOptions options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  const Elements kept(tensor);
  return at::from_blob(kept.bytes, tensor.sizes(), tensor.strides(), [kept](void*) {}, options);
}

}  // namespace

void add_number(int64_t number, const std::shared_ptr<Pool>& pool, double limit) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.pools[number] =
      std::make_shared<PoolEntry>(PoolEntry{pool->name(), limit, pool->disk().path(), pool});
}

void release_number(int64_t number) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.pools.erase(number);
}

MOE_OPERATOR(_expert_slots)

}  // namespace moe_mps

MOE_FUNCTION("_add_late_pool(int pool, float seconds) -> ()", add_late_pool)
MOE_FUNCTION("_release_slot_pool(int pool) -> ()", release_number)
MOE_FUNCTION("_close_slot_requests() -> ()", close_requests)
MOE_FUNCTION("_host_view(Tensor tensor) -> Tensor", host_view)
