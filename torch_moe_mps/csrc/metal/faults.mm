#include "faults.h"

#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "function.h"

namespace moe_mps {
namespace {

constexpr size_t kMostNamed = 4;   // operators of a message
constexpr int32_t kFaultCode = 5;  // MTLCommandBufferStatusError

struct CommandBuffer {
  int64_t number;
  std::vector<const char*> operators;  // in the order of their calls
};

struct State {
  std::mutex mutex;
  std::atomic<void*> buffer = nullptr;  // that is encoded into, until it is complete
  CommandBuffer* watched = nullptr;     // its; the buffer's handler frees it
  int64_t last = 0;                     // number of a buffer; of the stream's queue, as the two above
  int64_t raised = 0;                   // buffers up to this one are told of
  std::atomic<int64_t> incomplete = 0;  // buffers, with the one that is encoded into
  std::atomic<bool> failed = false;
  std::string fault;  // the first
};

State& state = *new State;  // handlers may come while the process ends

thread_local const char* current_operator = "";

std::string listed(const std::vector<const char*>& operators) {
  std::vector<const char*> distinct;
  for (const char* name : operators) {
    if (std::find(distinct.begin(), distinct.end(), name) == distinct.end()) distinct.push_back(name);
  }
  std::string text;
  for (size_t i = 0; i < std::min(distinct.size(), kMostNamed); ++i) {
    text += std::string(i == 0 ? " with " : ", ") + distinct[i];
  }
  if (distinct.size() > kMostNamed) text += c10::str(" and ", distinct.size() - kMostNamed, " more");
  return text;
}

const char* advice(NSError* error) {
  if (error != nil && [error code] == MTLCommandBufferErrorOutOfMemory) {
    return "what the model, its cache and a prompt take must fit in the GPU's memory: fewer bits, kv_bits=8, "
           "prefill_chunk_size=512 in generate(), or fewer other programs";
  }
  return "macOS stops work that keeps the display waiting: MOE_MPS_COMMIT_EVERY=4 and prefill_chunk_size=512 "
         "in generate() make it shorter, and fewer programs that draw leave more time; if it stays, "
         "`torch-moe-mps check` writes a report for an issue";
}

// Called by Metal, on a thread of its own.
void complete(id<MTLCommandBuffer> buffer, std::unique_ptr<CommandBuffer> watched) {
  void* own = (__bridge void*)buffer;
  state.buffer.compare_exchange_strong(own, nullptr);  // another one may get its address
  --state.incomplete;
  if ([buffer status] != MTLCommandBufferStatusError) return;
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (watched->number <= state.raised || state.failed) return;
  NSError* error = [buffer error];
  state.fault = c10::str("moe_mps: the GPU has not finished a command buffer", listed(watched->operators),
                         ": ", error == nil ? "unknown error" : [[error localizedDescription] UTF8String],
                         "; what was computed before this message is lost: ", advice(error));
  state.failed = true;
}

// In a block of the stream's queue. Returns: what is known of the stream's buffer.
CommandBuffer& watched(at::mps::MPSStream* stream) {
  id<MTLCommandBuffer> buffer = [stream->commandBuffer() rootCommandBuffer];
  if (state.buffer != (__bridge void*)buffer) {
    CommandBuffer* made = state.watched = new CommandBuffer{++state.last, {}};
    [buffer addCompletedHandler:^(id<MTLCommandBuffer> completed) {
      @autoreleasepool {
        complete(completed, std::unique_ptr<CommandBuffer>(made));
      }
    }];
    ++state.incomplete;
    state.buffer = (__bridge void*)buffer;
  }
  return *state.watched;
}

// For what only torch has encoded.
void watch() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      watched(stream);
    }
  });
}

}  // namespace

void name_work(const char* operator_name) {
  current_operator = operator_name;
}

bool watch_work(at::mps::MPSStream* stream) {
  std::vector<const char*>& operators = watched(stream).operators;
  operators.push_back(current_operator);
  return operators.size() == 1;
}

bool has_queued_work() {
  return state.incomplete > 2;  // the third is encoded into
}

void raise_fault() {
  if (!state.failed) return;
  __block std::string fault;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      // What is encoded from here on goes into a buffer of its own, of which nobody has been told.
      stream->synchronize(at::mps::SyncType::COMMIT);
      const std::lock_guard<std::mutex> lock(state.mutex);
      state.raised = state.last;
      state.failed = false;
      fault.swap(state.fault);
    }
  });
  if (fault.empty()) return;  // another thread has raised it
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kFaultCode, fault);
}

}  // namespace moe_mps

MOE_FUNCTION("_watch() -> ()", watch)
MOE_FUNCTION("_raise_fault() -> ()", raise_fault)
