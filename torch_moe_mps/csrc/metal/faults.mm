#include "faults.h"

#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "function.h"

namespace moe_mps {
namespace {

constexpr size_t kMostNamed = 4;    // operators of a message
constexpr size_t kMostListed = 16;  // dispatches of a message
constexpr int32_t kFaultCode = 5;   // MTLCommandBufferStatusError

// Buffers of a stream.
struct Stream {
  void* buffer = nullptr;                              // encoded into, until it is complete
  Work* watched = nullptr;                             // its; the buffer's handler frees it
  int64_t last = 0;                                    // number of a buffer
  std::map<int64_t, id<MTLCommandBuffer>> incomplete;  // retained, also the open one
  int64_t raised = 0;                                  // failures of buffers up to this one have been raised
};

// A failure, and those that came before it was raised first.
struct Fault {
  std::string text;  // of the first buffer that failed
  const Stream* stream;
  int64_t number;                          // of that buffer
  std::map<const Stream*, int64_t> first;  // buffer of each stream that is lost
  bool is_raised = false;
};

// A thread's use of a stream.
struct StreamUse {
  int64_t last = 0;  // buffer with its work
  size_t told = 0;   // faults of which it knows
};

struct FaultState {
  std::mutex mutex;
  std::condition_variable completed;
  std::map<at::mps::MPSStream*, Stream> streams;  // torch frees none
  std::deque<Fault> faults;
  std::atomic<size_t> count = 0;  // of them
  bool is_ignored = false;        // the buffer of which Metal has told last
  double busy = 0, until = 0;     // seconds that the GPU has worked, and when it last ended a buffer
};

FaultState& fault_state = *new FaultState;  // handlers may come while the process ends

thread_local const char* current_operator = "";
thread_local std::map<at::mps::MPSStream*, StreamUse> stream_uses;

// The distinct items, joined by commas: the first `most`, and how many more there are.
template <class Item, class Text>
std::string listed(const std::vector<Item>& items, size_t most, const Text& text_of) {
  std::vector<Item> distinct;
  for (const Item& item : items) {
    if (std::find(distinct.begin(), distinct.end(), item) == distinct.end()) distinct.push_back(item);
  }
  std::string text;
  for (size_t i = 0; i < std::min(distinct.size(), most); ++i) {
    text += (i == 0 ? "" : ", ") + text_of(distinct[i]);
  }
  if (distinct.size() > most) text += c10::str(" and ", distinct.size() - most, " more");
  return text;
}

// " with <operators>"; nothing for a buffer of torch's work.
std::string operators_of(const Work& work) {
  const auto text = [](const char* name) { return std::string(name); };
  return work.operators.empty() ? "" : " with " + listed(work.operators, kMostNamed, text);
}

// "; its kernels: <kernels with grids>", the same.
std::string kernels_of(const Work& work) {
  const auto text = [](const Launch& launch) { return launch.text(); };
  return work.launches.empty() ? "" : "; its kernels: " + listed(work.launches, kMostListed, text);
}

// macOS runs nothing more of a process that has caused several errors.
bool is_ignored(NSError* error) {
  return error != nil && [error code] == MTLCommandBufferErrorAccessRevoked;
}

const char* advice(NSError* error, const Work& work) {
  // Metal has no code of its own for a buffer that failed with another one.
  if (error != nil && std::strstr([[error localizedDescription] UTF8String], "victim") != nullptr) {
    return "other work on the GPU failed, of this program or of another: the same call may be right now";
  }
  if (error != nil && [error code] == MTLCommandBufferErrorOutOfMemory) {
    return "what the model, its cache and a prompt take must fit in the GPU's memory: fewer bits, a smaller "
           "experts_memory, kv_bits=8, prefill_chunk_size=512 in generate(), or fewer other programs";
  }
  if (error != nil && [error code] == MTLCommandBufferErrorTimeout && work.waits_for) {
    return "macOS stops a GPU that has waited for some 5 s, and this one waited for experts: the disk was "
           "too "
           "slow, or the system too busy; a larger experts_memory reads less, and fewer programs beside it "
           "leave more time; if it stays, `torch-moe-mps check` writes a report for an issue";
  }
  return "macOS stops work that keeps the display waiting: MOE_MPS_COMMIT_EVERY=4 and prefill_chunk_size=512 "
         "in generate() make it shorter, and fewer programs that draw leave more time; if it stays, "
         "`torch-moe-mps check` writes a report for an issue";
}

// Under the mutex.
Stream& stream_of(at::mps::MPSStream* stream) {
  return fault_state.streams[stream];
}

// Under the mutex. The first fault since one was raised is kept, and of a stream's that of the first buffer.
void store_fault(const Stream& stream, int64_t number, std::string fault) {
  if (number <= stream.raised) return;
  std::deque<Fault>& faults = fault_state.faults;
  if (faults.empty() || faults.back().is_raised) {
    Fault& made = faults.emplace_back(Fault{std::move(fault), &stream, number, {}});
    for (const auto& [_, each] : fault_state.streams)
      made.first[&each] = each.incomplete.empty() ? each.last + 1 : each.incomplete.begin()->first;
    made.first[&stream] = number;
    fault_state.count = faults.size();
  } else if (Fault& last = faults.back(); last.stream == &stream && number < last.number) {
    last.text = std::move(fault);
    last.first[&stream] = last.number = number;
  }
}

// The first fault of which a thread is not told yet, and has to be; null for none. Under the mutex.
Fault* untold(const StreamUse& use, const Stream& stream) {
  for (size_t n = use.told; n < fault_state.faults.size(); ++n) {
    Fault& fault = fault_state.faults[n];
    const auto first = fault.first.find(&stream);
    const bool is_lost = first != fault.first.end() && use.last >= first->second;
    if (is_lost || !fault.is_raised) return &fault;
  }
  return nullptr;
}

// Called by Metal, on a thread of its own.
void complete(Stream& stream, id<MTLCommandBuffer> buffer, const Work& watched) {
  const bool failed = [buffer status] == MTLCommandBufferStatusError;
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  if (stream.buffer == (__bridge void*)buffer) stream.buffer = nullptr;  // another one may get its address
  if (const auto found = stream.incomplete.find(watched.number); found != stream.incomplete.end()) {
    [found->second release];
    stream.incomplete.erase(found);
  }
  fault_state.completed.notify_all();
  const double start = [buffer GPUStartTime], end = [buffer GPUEndTime];
  fault_state.busy +=
      end - (start < fault_state.until && fault_state.until < end ? fault_state.until : start);
  fault_state.until = end;
  NSError* error = failed ? [buffer error] : nil;
  fault_state.is_ignored = is_ignored(error);
  if (!failed) return;
  const std::string said = error == nil ? "unknown error" : [[error localizedDescription] UTF8String];
  if (fault_state.is_ignored) {
    return store_fault(stream, watched.number,
                       c10::str("moe_mps: macOS has stopped all GPU work of this process, as it does after "
                                "several GPU errors: restart it (",
                                said, ")"));
  }
  store_fault(stream, watched.number,
              c10::str("moe_mps: the GPU has not finished a command buffer", operators_of(watched), ": ",
                       said, "; what was computed before this message is lost: ", advice(error, watched),
                       kernels_of(watched)));
}

// In a block of the stream's queue. Returns: what is known of the stream's buffer.
Work& watched(at::mps::MPSStream* on) {
  id<MTLCommandBuffer> buffer = [on->commandBuffer() rootCommandBuffer];
  std::unique_lock<std::mutex> lock(fault_state.mutex);
  Stream* stream = &stream_of(on);
  if (stream->buffer == (__bridge void*)buffer) return *stream->watched;
  Work* made = new Work;
  made->number = stream->last + 1;
  lock.unlock();
  [buffer addCompletedHandler:^(id<MTLCommandBuffer> completed) {
    @autoreleasepool {
      complete(*stream, completed, *std::unique_ptr<Work>(made));
    }
  }];
  lock.lock();
  stream->last = made->number;
  stream->incomplete[made->number] = [buffer retain];
  stream->buffer = (__bridge void*)buffer;
  stream->watched = made;
  return *made;
}

bool was_ignored() {
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  return fault_state.is_ignored;
}

double gpu_busy() {
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  return fault_state.busy;
}

// Watches the buffer that a stream encodes into, also where only torch has; `commits` gives it to the GPU.
// Returns: its number.
int64_t watch_on(at::mps::MPSStream* stream, bool commits) {
  __block int64_t number = 0;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      number = watched(stream).number;
      if (commits) stream->synchronize(at::mps::SyncType::COMMIT);
    }
  });
  return number;
}

// A stream as Python has it; torch frees none.
int64_t handle(at::mps::MPSStream* stream) {
  return reinterpret_cast<int64_t>(stream);
}

// The same on the current stream. Returns: the stream, and the number.
std::tuple<int64_t, int64_t> watch(bool commits) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  return {handle(stream), watch_on(stream, commits)};
}

// Waits until Metal has told how a stream's buffers up to this number ended. The host has waited for them.
void hear_up_to(at::mps::MPSStream* stream, int64_t last) {
  std::unique_lock<std::mutex> lock(fault_state.mutex);
  const auto& incomplete = stream_of(stream).incomplete;
  const bool heard = fault_state.completed.wait_for(
      lock, kToldWithin, [&] { return incomplete.empty() || incomplete.begin()->first > last; });
  TORCH_CHECK(heard, "moe_mps: Metal has not told how a command buffer ended, ", kToldWithin.count(),
              " s behind a wait for it: `torch-moe-mps check` writes a report for an issue");
}

// Waits for one buffer of a stream and for those before it, and hears of them; the GPU goes on with later
// ones.
void finish_up_to(at::mps::MPSStream* stream, int64_t number) {
  __block id<MTLCommandBuffer> waited = nil;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      id<MTLCommandBuffer> open = [stream->commandBuffer() rootCommandBuffer];
      std::unique_lock<std::mutex> lock(fault_state.mutex);
      const auto& incomplete = stream_of(stream).incomplete;
      const auto found = incomplete.find(number);
      if (found == incomplete.end()) return;  // it is complete
      waited = [found->second retain];
      lock.unlock();
      if (waited == open) stream->synchronize(at::mps::SyncType::COMMIT);
    }
  });
  if (waited != nil) {
    @autoreleasepool {
      [waited waitUntilCompleted];
      [waited release];
    }
  }
  hear_up_to(stream, number);  // Metal may tell of a later buffer first
}

// Waits for all that is encoded on the current stream.
void finish_current() {
  finish(at::mps::getCurrentMPSStream());
}

// Waits for all that is encoded on another stream than the current one. Returns: the current one.
int64_t follow_stream(int64_t before) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  if (before != 0 && before != handle(stream)) finish(reinterpret_cast<at::mps::MPSStream*>(before));
  return handle(stream);
}

// Gives memory that torch caches back to macOS. Torch's own function waits for the GPU with Python's lock,
// which this one's caller has released, in a block of the stream's queue, where this has waited before.
void release_cache() {
  finish(at::mps::getCurrentMPSStream());
  try {
    at::detail::getMPSHooks().emptyCache();
  } catch (const c10::Error&) {  // from torch 2.15 on, of a buffer that has failed: it is stored here, too
  }
}

// Waits for all that the current stream has given to the GPU. Raises the buffers' fault.
void raise_fault_of_committed() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  __block int64_t newest = 0;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      id<MTLCommandBuffer> open = [stream->commandBuffer() rootCommandBuffer];
      const std::lock_guard<std::mutex> lock(fault_state.mutex);
      const Stream& of = stream_of(stream);
      newest = of.buffer == (__bridge void*)open ? of.last - 1 : of.last;
    }
  });
  finish_up_to(stream, newest);
  raise_fault();
}

}  // namespace

std::string Launch::text() const {
  const auto size = [](const std::array<int64_t, 3>& of) { return c10::str(of[0], "x", of[1], "x", of[2]); };
  return c10::str(kernel, " grid ", grid[0] == 0 ? "of an earlier one" : size(grid), " of ", size(threads));
}

void name_work(const char* operator_name) {
  current_operator = operator_name;
}

Work& watch_work(at::mps::MPSStream* stream) {
  Work& work = watched(stream);
  stream_uses[stream].last = work.number;
  work.operators.push_back(current_operator);
  return work;
}

void wait_for_buffer(int64_t stream, int64_t number) {
  finish_up_to(reinterpret_cast<at::mps::MPSStream*>(stream), number);
  raise_fault();
}

size_t incomplete_buffers(at::mps::MPSStream* stream) {
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  return stream_of(stream).incomplete.size();
}

void wait_for_room(at::mps::MPSStream* stream, size_t most) {
  while (true) {
    std::unique_lock<std::mutex> lock(fault_state.mutex);
    const auto& incomplete = stream_of(stream).incomplete;
    if (incomplete.size() < most) return;
    const int64_t oldest = incomplete.begin()->first;
    lock.unlock();
    finish_up_to(stream, oldest);
  }
}

void finish(at::mps::MPSStream* stream) {
  finish_up_to(stream, watch_on(stream, true));
}

bool has_incomplete_work() {
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  return std::any_of(fault_state.streams.begin(), fault_state.streams.end(),
                     [](const auto& stream) { return !stream.second.incomplete.empty(); });
}

void report_fault(at::mps::MPSStream* stream, int64_t buffer, const std::string& fault) {
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  store_fault(stream_of(stream), buffer, fault);
}

bool has_fault() {
  const std::lock_guard<std::mutex> lock(fault_state.mutex);
  return !fault_state.faults.empty() && !fault_state.faults.back().is_raised;
}

void raise_fault() {
  if (fault_state.count == 0) return;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  StreamUse& use = stream_uses[stream];
  if (use.told == fault_state.count) return;
  {
    const std::lock_guard<std::mutex> lock(fault_state.mutex);
    if (untold(use, stream_of(stream)) == nullptr) {
      use.told = fault_state.faults.size();
      return;
    }
  }
  // All that was encoded is lost with it; torch, too, is told of each buffer that fails.
  finish(stream);
  __block std::string text;
  StreamUse* own = &use;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    const std::lock_guard<std::mutex> lock(fault_state.mutex);
    Stream& of = stream_of(stream);
    const Fault* fault = untold(*own, of);
    own->told = fault_state.faults.size();
    if (fault == nullptr) return;  // another thread was told
    text = fault->text;
    for (Fault& each : fault_state.faults) each.is_raised = true;
    of.raised = of.last;
    try {
      stream->checkLastError();  // from torch 2.15 on it keeps the error, and raises it at its next wait
    } catch (const c10::Error&) {
    }
  });
  if (!text.empty()) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kFaultCode, text);
}

}  // namespace moe_mps

MOE_FUNCTION("_watch(bool commits=False) -> (int, int)", watch)
MOE_FUNCTION("_wait_for_buffer(int stream, int number) -> ()", wait_for_buffer)
MOE_FUNCTION("_finish() -> ()", finish_current)
MOE_FUNCTION("_follow_stream(int before) -> int", follow_stream)
MOE_FUNCTION("_release_cache() -> ()", release_cache)
// Seconds that the GPU has worked on watched buffers of which Metal has told.
MOE_FUNCTION("_gpu_busy() -> float", gpu_busy)
MOE_FUNCTION("_raise_fault() -> ()", raise_fault_of_committed)
// Whether macOS ignored the last buffer, for errors before it.
MOE_FUNCTION("_was_ignored() -> bool", was_ignored)
