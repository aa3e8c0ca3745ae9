// at::mps::MPSStream, which libtorch declares everywhere and defines on macOS only.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>

#include "../metal/dispatch.h"
#include "../metal/foundation.h"
#include "../metal/metal.h"
#include "../metal/runtime.h"
#include "device.h"
#include "torch.h"

namespace at::mps {

MPSStream::MPSStream(Stream stream)
    : _stream(stream),
      _commandQueue(simulated_queue(stream.id())),
      _serialQueue(dispatch_queue_create("metal gpu stream", DISPATCH_QUEUE_SERIAL)) {}
MPSStream::~MPSStream() = default;
MPSCommandBuffer* MPSStream::commandBuffer() {
  if (!_commandBuffer) {
    const simulator::AsTorch as_torch;
    @autoreleasepool {
      _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
    }
    simulator::keep_for_the_process(_commandBuffer);
  }
  return _commandBuffer;
}
id<MTLDevice> MPSStream::device() const {
  return simulated_device();
}
id<MTLComputeCommandEncoder> MPSStream::commandEncoder() {
  if (!simulator::in_block_of((void*)_serialQueue)) {
    simulator::fail("commandEncoder() is called outside of a block of the stream's queue; encode inside "
                    "at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{ ... })");
  }
  return simulated_encoder(_stream.id());
}
void MPSStream::endKernelCoalescing() {
  simulator::end_encoder(*simulator::encoding_of(_stream.id()));
}
void MPSStream::checkLastError() {
  simulator::raise_stored_error(_stream.id());
}
void MPSStream::synchronize(SyncType type) {
  if (type == SyncType::NONE) return;
  if (type != SyncType::COMMIT)
    simulator::fail("stream->synchronize: host code never waits, it only commits");
  if (!simulator::in_block_of((void*)_serialQueue)) {
    simulator::fail("stream->synchronize: a commit is called outside of a block of the stream's queue");
  }
  const simulator::AsTorch as_torch;
  endKernelCoalescing();
  [commandBuffer() commitAndContinue];
}

namespace {
thread_local simulator::StreamNumber current = 0;

MPSStream* numbered(simulator::StreamNumber number) {
  static std::mutex& mutex = *new std::mutex;
  static auto& streams = *new std::map<simulator::StreamNumber, MPSStream*>;
  const std::lock_guard<std::mutex> lock(mutex);
  MPSStream*& stream = streams[number];
  if (stream == nullptr)
    stream = new MPSStream(Stream(Stream::UNSAFE, c10::Device(c10::DeviceType::MPS, 0), number));
  return stream;
}
}  // namespace

MPSStream* MPSStreamImpl::_stream = nullptr;
MPSStreamImpl::MPSStreamImpl() = default;
MPSStream* MPSStreamImpl::getInstance() {
  return numbered(0);
}
MPSStream* getCurrentMPSStream() {
  return numbered(current);
}

MPSDevice::MPSDevice() : _mtl_device(simulated_device()) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static auto* const device = new MPSDevice;
  return device;
}
unsigned MPSDevice::getCoreCount() const {
  const char* cores = std::getenv("SIMULATED_CORES");
  return cores == nullptr ? 16 : std::atoi(cores);
}

__attribute__((visibility("default"))) void dispatch_sync_with_rethrow(dispatch_queue_t queue,
                                                                       void (^block)()) {
  __block std::exception_ptr exception;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      exception = std::current_exception();
    }
  });
  if (exception) std::rethrow_exception(exception);
}

}  // namespace at::mps

namespace simulator {

StreamNumber current_stream() {
  return at::mps::getCurrentMPSStream()->unwrap().id();
}
void* stream_queue() {
  return (void*)at::mps::getCurrentMPSStream()->queue();
}
void* stream_command_buffer() {
  return (void*)at::mps::getCurrentMPSStream()->commandBuffer();
}

namespace {
thread_local int stand_ins = 0;
thread_local bool waits_behind = false;
}  // namespace

void synchronize() {
  use_device();
  const bool stands_in = StandIn::is_there();  // on this thread
  // Even if nothing waits: on macOS, reading a tensor inside a block always enters the queue again.
  if (has_pending() || in_block_of(stream_queue())) {
    const bool waits = waits_behind;
    at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
      if (!stands_in || waits) {
        end_encoder();
        check_encoder(*encoding_of(current_stream()));
      }
      stands_in ? run_before_operator(waits) : run_pending();
    });
  }
  // Pools that an exception left open between two operators end here, as with the pool around a run loop's
  // turn.
  if (current_block() == 0) drain_pools(0);
  const std::string reports = take_reports();
  if (!reports.empty()) fail(reports);
}

void in_queue(const std::function<void()>& act) {
  if (in_block_of(stream_queue())) return act();
  const auto* called = &act;  // a block keeps no reference
  at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
    (*called)();
  });
}

void commit_in_queue() {
  in_queue([] { at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT); });
}

void end_encoder() {
  in_queue([] { at::mps::getCurrentMPSStream()->endKernelCoalescing(); });
}

StandIn::StandIn(bool waits) {
  if (stand_ins++ == 0) waits_behind = waits;
}
StandIn::~StandIn() {
  if (--stand_ins == 0) waits_behind = false;
}
bool StandIn::is_there() {
  return stand_ins > 0;
}
void StandIn::count() const {
  if (stand_ins == 1) record_operator(current_stream());
}

void synchronize_host() {
  synchronize();
  if (StandIn::is_there()) return;
  wait_for_all();
  raise_stored_error(current_stream());
}

}  // namespace simulator

// The stream of the calling thread from here on.
extern "C" __attribute__((visibility("default"))) void simulator_use_stream(int64_t number) {
  at::mps::current = number;
}
