#include "encoder.h"

#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "faults.h"
#include "function.h"
#include "work.h"

namespace moe_mps {
namespace {

// torch keeps the MTLBuffer itself where other devices keep an address.
id<MTLBuffer> buffer_of(const at::Tensor& tensor) {
  return __builtin_bit_cast(id<MTLBuffer>, tensor.storage().data());
}

NSUInteger byte_offset(const at::Tensor& tensor) {
  return static_cast<NSUInteger>(tensor.storage_offset()) * tensor.element_size();
}

MTLSize metal_size(const Size& size) {
  return MTLSizeMake(size.x, size.y, size.z);
}

// At least so many make a buffer for a GPU that has none waiting behind the one it runs: with one buffer
// queued it goes on at once, where the host hears of a completed one 50 to 150 us later.
constexpr int64_t kFirstDispatches = 8;
constexpr size_t kBuffers = 3;  // the running one, the queued one, and the one that is encoded into

// Counted over the process: all streams and threads.
std::atomic<int64_t> encoded = 0;    // dispatches since it began
std::atomic<int64_t> interval = -1;  // see commit_every
std::atomic<double> longest = 0;     // seconds of a buffer, since somebody asked

// Names of the dispatches that this thread encodes, for the report of a wrong result.
struct Recorded {
  bool wanted = false;
  std::vector<std::string> lines;
};

thread_local Recorded recorded;

// Whether to commit the stream, now that one more dispatch is encoded into its buffer.
bool commit_is_due(at::mps::MPSStream* stream, Work& work, double seconds) {
  ++encoded;
  work.seconds += seconds;
  for (double known = longest; known < work.seconds;) {
    if (longest.compare_exchange_weak(known, work.seconds)) break;
  }
  const int64_t every = interval;
  const auto dispatches = static_cast<int64_t>(work.launches.size());
  if (every >= 0) return every > 0 && dispatches >= every;
  if (work.seconds >= kBufferSeconds) return true;
  return dispatches >= kFirstDispatches && incomplete_buffers(stream) < kBuffers;
}

void limit_dispatches(double seconds) {
  dispatch_seconds = seconds;
}

double longest_buffer() {
  return longest.exchange(0);
}

void record_dispatches(bool wanted) {
  recorded = {wanted, {}};
}

std::vector<std::string> recorded_dispatches() {
  return recorded.lines;
}

}  // namespace

void commit_every(int64_t dispatches) {
  interval = dispatches;
}

int64_t encoded_dispatches() {
  return encoded;
}

const at::Tensor& Command::given(const OptionalTensor& tensor) const {
  if (tensor && tensor->defined()) return *tensor;
  TORCH_CHECK(stand_in_ != nullptr, "moe_mps: ", pipeline_->name, " has nothing in place of an argument");
  return *stand_in_;
}

const at::Tensor& Command::contiguous(const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.is_contiguous(), "moe_mps: ", pipeline_->name, " cannot bind a tensor of strides ",
              tensor.strides());
  return tensor;
}

Command& Command::bind_from(const at::Tensor& tensor, int64_t element) {
  TORCH_CHECK(tensor.is_mps() && tensor.numel() > 0, "moe_mps: ", pipeline_->name,
              " cannot bind a tensor on ", tensor.device(), " of shape ", tensor.sizes());
  buffers_.push_back(buffer_of(tensor));
  bytes_ += static_cast<double>(tensor.numel()) * static_cast<double>(tensor.element_size());
  offsets_.push_back(byte_offset(tensor) + static_cast<NSUInteger>(element) * tensor.element_size());
  return *this;
}

void Command::indirect(const at::Tensor& arguments, int64_t offset, Size threads) {
  TORCH_CHECK(arguments.is_mps() && arguments.element_size() == 4, "moe_mps: ", pipeline_->name,
              " needs a grid of 32-bit numbers on MPS");
  indirect_buffer_ = buffer_of(arguments);
  indirect_offset_ = byte_offset(arguments) + static_cast<NSUInteger>(offset) * 4;
  set_threads(threads);
}

void Command::set_threads(Size threads) {
  threads_ = threads;
  const NSUInteger count = threads.x * threads.y * threads.z;
  if (count > *pipeline_->launched) *pipeline_->launched = count;
  TORCH_CHECK(count <= pipeline_->most_threads, "moe_mps: ", pipeline_->name, " takes ", count,
              " threads a threadgroup, its pipeline on this GPU at most ", pipeline_->most_threads);
  const NSUInteger bytes = pipeline_->static_bytes + threadgroup_bytes_;
  TORCH_CHECK(bytes <= pipeline_->most_bytes, "moe_mps: ", pipeline_->name, " takes ", bytes,
              " bytes of threadgroup memory, this GPU has ", pipeline_->most_bytes);
}

void Command::encode_buffers(id<MTLComputeCommandEncoder> encoder, size_t first, size_t last,
                             size_t shift) const {
  if (first == last) return;
  [encoder setBuffers:buffers_.data() + first
              offsets:offsets_.data() + first
            withRange:NSMakeRange(first + shift, last - first)];
}

void Command::encode(id<MTLComputeCommandEncoder> encoder) const {
  [encoder setComputePipelineState:pipeline_->state];
  if (params_size_ > 0) {
    encode_buffers(encoder, 0, params_index_, 0);
    [encoder setBytes:params_.data() length:params_size_ atIndex:params_index_];
    encode_buffers(encoder, params_index_, buffers_.size(), 1);
  } else {
    encode_buffers(encoder, 0, buffers_.size(), 0);
  }
  if (threadgroup_bytes_ > 0) [encoder setThreadgroupMemoryLength:threadgroup_bytes_ atIndex:0];
  if (indirect_buffer_ != nil) {
    [encoder dispatchThreadgroupsWithIndirectBuffer:indirect_buffer_
                               indirectBufferOffset:indirect_offset_
                              threadsPerThreadgroup:metal_size(threads_)];
  } else {
    [encoder dispatchThreadgroups:metal_size(grid_) threadsPerThreadgroup:metal_size(threads_)];
  }
  // The encoder is shared with torch: its kernels would have this memory on top of their own, which may be
  // all that the GPU has. llama.cpp sets a length of 0, too.
  if (threadgroup_bytes_ > 0) [encoder setThreadgroupMemoryLength:0 atIndex:0];
}

Launch Command::launch() const {
  const std::array<int64_t, 3> none{};
  return {
      .kernel = pipeline_->name.c_str(),
      .grid = indirect_buffer_ == nil ? std::array{grid_.x, grid_.y, grid_.z} : none,
      .threads = {threads_.x, threads_.y, threads_.z},
  };
}

std::string Command::text() const {
  const std::string memory =
      threadgroup_bytes_ == 0 ? "" : c10::str(", ", threadgroup_bytes_, " bytes of threadgroup memory");
  return launch().text() + memory;
}

Command& Commands::add(const Library& library, std::string_view function) {
  // Pipelines are built here, in front of encode(): compiling must not hold up the stream's queue.
  return commands_.emplace_back(pipeline(library, function));
}

void Commands::encode() {
  raise_fault();
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  const Commands* commands = this;
  if (recorded.wanted) {
    for (const Command& command : commands_) recorded.lines.push_back(command.text());
  }
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      id<MTLComputeCommandEncoder> encoder = nil;
      Work* work = nullptr;
      for (const Command& command : commands->commands_) {
        if (encoder == nil) {
          encoder = stream->commandEncoder();
          work = &watch_work(stream);
        }
        command.encode(encoder);
        work->launches.push_back(command.launch());
        if (!commit_is_due(stream, *work, seconds_of(command.issue_cycles_, command.bytes_))) continue;
        stream->synchronize(at::mps::SyncType::COMMIT);
        encoder = nil;
      }
    }
  });
}

}  // namespace moe_mps

MOE_FUNCTION("_commit_every(int dispatches) -> ()", commit_every)
// The estimate of the longest command buffer since the last call, in seconds.
MOE_FUNCTION("_longest_buffer() -> float", longest_buffer)
MOE_FUNCTION("_limit_dispatches(float seconds) -> ()", limit_dispatches)
MOE_FUNCTION("_encoded_dispatches() -> int", encoded_dispatches)
// From here on, whether the dispatches of this thread are listed; none is yet.
MOE_FUNCTION("_record_dispatches(bool wanted) -> ()", record_dispatches)
MOE_FUNCTION("_recorded_dispatches() -> str[]", recorded_dispatches)
