// MTLDevice, MTLCommandQueue and MTLCommandBuffer as host code sees them: the stream is PyTorch's, so what
// would create or drive another one is a finding.
#import <Metal/Metal.h>

#include <Block.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "foundation.h"
#include "metal.h"
#include "runtime.h"

using simulator::fail;

namespace {
std::atomic<bool> strict = false;

[[noreturn]] void not_ours(const char* method) {
  fail(std::string(method) +
       ": host code encodes with stream->commandEncoder() only; queues, command buffers, other "
       "encoders, commit and wait belong to PyTorch's stream");
}
}  // namespace

static MPSCommandBuffer* simulated_buffers(simulator::StreamNumber stream);
static id<MTLCommandBuffer> simulated_command_buffer(const std::shared_ptr<simulator::Encoding>& encoding);
static id<MTLCommandQueue> simulated_new_queue(simulator::StreamNumber stream, bool is_hosts = false);

namespace {
thread_local int torches = 0;

// Whether host code that has to be portable makes an object for itself.
bool is_hosts() {
  return simulator::is_strict() && !simulator::AsTorch::is_there();
}
// Of what host code may do only where it does not have to be portable.
void only_torch(const char* method) {
  if (is_hosts()) not_ours(method);
}
}  // namespace

simulator::AsTorch::AsTorch() {
  ++torches;
}
simulator::AsTorch::~AsTorch() {
  --torches;
}
bool simulator::AsTorch::is_there() {
  return torches > 0;
}

bool simulator::is_strict() {
  return strict;
}
extern "C" void simulator_set_strict(int on) {
  strict = on;
}

@interface SimulatorDevice : NSObject <MTLDevice> {
  std::atomic<bool> maximize_concurrent_compilation;
}
@end
int simulator::macos() {
  const char* version = std::getenv("SIMULATED_MACOS");
  return version == nullptr ? 26 : std::atoi(version);
}

@implementation SimulatorDevice
- (NSString*)name {
  const char* name = std::getenv("SIMULATED_GPU");
  return name == nullptr ? @"Simulated Apple GPU" : [NSString stringWithUTF8String:name];
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return simulator::kMaxThreadgroupMemory;
}
- (NSUInteger)maxBufferLength {
  return simulator::recommended_bytes();
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return simulator::recommended_bytes();
}
- (NSUInteger)currentAllocatedSize {
  return simulator::live_bytes();
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0) fail("newBufferWithLength: of no bytes");
  const auto memory = std::make_shared<simulator::Memory>(length);
  memory->is_hosts = is_hosts();
  return simulated_buffer(memory, nil, 0);
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  only_torch("newBufferWithBytesNoCopy");
  if (length == 0 || length % simulator::kPage != 0 ||
      reinterpret_cast<uintptr_t>(pointer) % simulator::kPage != 0)
    fail("newBufferWithBytesNoCopy: pointer and length must be multiples of a page");
  std::function<void()> release = [] {};
  if (deallocator) {
    void (^kept)(void*, NSUInteger) = Block_copy(deallocator);
    release = [kept, pointer, length] {
      kept(pointer, length);
      Block_release(kept);
    };
  }
  return simulated_buffer(std::make_shared<simulator::Memory>(static_cast<char*>(pointer), length, release),
                          nil, 0);
}
- (MTLSizeAndAlign)heapBufferSizeAndAlignWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  constexpr NSUInteger kAlign = 256;  // assumed
  return {(length + kAlign - 1) / kAlign * kAlign, kAlign};
}
- (id<MTLHeap>)newHeapWithDescriptor:(MTLHeapDescriptor*)descriptor {
  only_torch("newHeapWithDescriptor");
  return simulated_new_heap(descriptor);
}
- (BOOL)shouldMaximizeConcurrentCompilation {
  return maximize_concurrent_compilation;
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)maximize {
  maximize_concurrent_compilation = maximize;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  const char* chip = std::strstr([[self name] UTF8String], "Apple M");
  const int generation = chip == nullptr ? 2 : std::atoi(chip + std::strlen("Apple M"));
  if (generation >= 5) return family <= MTLGPUFamilyApple10;
  if (generation >= 3) return family <= MTLGPUFamilyApple9;
  return family <= (generation == 2 ? MTLGPUFamilyApple8 : MTLGPUFamilyApple7);
}
- (BOOL)respondsToSelector:(SEL)selector {
  if (sel_isEqual(selector, @selector(newTensorWithDescriptor:error:))) return simulator::macos() >= 26;
  if (sel_isEqual(selector, @selector(newResidencySetWithDescriptor:error:))) return simulator::macos() >= 15;
  return [super respondsToSelector:selector];
}
- (id)newTensorWithDescriptor:(id)descriptor error:(NSError**)error {
  fail("newTensorWithDescriptor is not simulated");
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor
                                               error:(NSError**)error {
  return simulated_residency_set(descriptor);
}
- (id<MTLSharedEvent>)newSharedEvent {
  return simulated_shared_event();
}
- (id<MTLCommandQueue>)newCommandQueue {
  static std::atomic<simulator::StreamNumber> next{simulator::StreamNumber{1} << 32};  // none of torch's
  return simulated_new_queue(next++, is_hosts());
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error {
  return simulated_library(source, options, error);
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  return simulated_compiled_library(url, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError**)error {
  return simulated_pipeline(function, error);
}
@end

@interface SimulatorCommandQueue : NSObject <MTLCommandQueue> {
 @public
  simulator::StreamNumber stream;
  bool is_hosts;  // of host code's own
}
@end
@implementation SimulatorCommandQueue
- (id<MTLCommandBuffer>)commandBuffer {
  if (!is_hosts) only_torch("[commandQueue commandBuffer]");
  return simulated_command_buffer(simulator::new_encoding(stream, true, is_hosts));
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  only_torch("commandBufferWithUnretainedReferences");
  return simulated_command_buffer(simulator::new_encoding(stream, false));
}
@end

// Of torch's stream, or host code's own.
@interface SimulatorCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  std::shared_ptr<simulator::Encoding>* encoding;
  std::shared_ptr<simulator::CommandBuffer>* buffer;
}
@end
@implementation SimulatorCommandBuffer
- (void)dealloc {
  delete encoding;
  delete buffer;
  [super dealloc];
}
- (MTLCommandBufferStatus)status {
  return static_cast<MTLCommandBufferStatus>((*buffer)->status);
}
- (NSError*)error {
  const simulator::Failure failure = (*buffer)->failure;
  if (failure == simulator::Failure::kNone) return nil;
  return simulated_error(simulator::text_of(failure), static_cast<long>(failure));
}
- (double)GPUStartTime {
  return (*buffer)->start;
}
- (double)GPUEndTime {
  return (*buffer)->end;
}
// A handler, until the command buffer has called it or is gone.
- (std::function<void()>)handler:(MTLCommandBufferHandler)block {
  const std::shared_ptr<void> kept((void*)Block_copy(block), [](void* copied) { Block_release(copied); });
  return [self, kept] {
    @autoreleasepool {
      ((MTLCommandBufferHandler)kept.get())(self);
    }
  };
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [self check:"addScheduledHandler" says:"Scheduled handler provided after commit call"];
  (*buffer)->scheduled.push_back([self handler:block]);
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [self check:"addCompletedHandler" says:"Completed handler provided after commit call"];
  (*buffer)->tells_host = true;
  (*buffer)->completed.push_back([self handler:block]);
}
- (void)check:(const char*)method says:(const char*)text {
  if ((*buffer)->status >= simulator::Status::kCommitted) fail(std::string(method) + ": " + text);
}
- (void)check:(const char*)method {
  [self check:method says:"the command buffer is committed, and takes no command any more"];
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [self check:"encodeSignalEvent"];
  simulated_signal(event, value, **encoding);
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [self check:"encodeWaitForEvent"];
  simulated_wait(event, value, **encoding);
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  if (!(*buffer)->is_hosts) only_torch("computeCommandEncoder");
  [self check:"computeCommandEncoder"];
  return simulated_compute_encoder(*encoding);
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  only_torch("blitCommandEncoder");
  [self check:"blitCommandEncoder"];
  return simulated_blit_encoder(*encoding);
}
- (void)enqueue {
  only_torch("enqueue");
  if ((*buffer)->status != simulator::Status::kNotEnqueued)
    fail("enqueue: enqueue an already enqueued command buffer");
  [self keep];
  simulator::enqueue(*buffer, (*encoding)->queue);
}
- (void)commit {
  if (!(*buffer)->is_hosts) only_torch("commit");
  [self check:"commit" says:"commit an already committed command buffer"];
  simulator::check_encoder(**encoding);
  if (simulator::is_of_torch(**encoding)) return simulator::commit((*encoding)->queue);
  [self keep];
  simulator::commit(*buffer, (*encoding)->queue);
}
// Its queue retains it, until it is complete.
- (void)keep {
  if ((*buffer)->object) return;
  (*buffer)->object = std::shared_ptr<void>((void*)[self retain], [](void* kept) { [(id)kept release]; });
}
- (void)waitUntilCompleted {
  simulator::wait_for(**buffer);
}
@end

@implementation MPSCommandBuffer
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  only_torch("commandBufferFromCommandQueue");
  if (!queue) fail("commandBufferFromCommandQueue: the queue is nil");
  return simulated_buffers(((SimulatorCommandQueue*)queue)->stream);
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [[self rootCommandBuffer] blitCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [[self rootCommandBuffer] computeCommandEncoder];
}
- (id<MTLCommandBuffer>)commandBuffer {
  return self;
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return nil;  // of a stream's alone
}
- (MTLCommandBufferStatus)status {
  return [[self rootCommandBuffer] status];
}
- (NSError*)error {
  return [[self rootCommandBuffer] error];
}
- (double)GPUStartTime {
  return [[self rootCommandBuffer] GPUStartTime];
}
- (double)GPUEndTime {
  return [[self rootCommandBuffer] GPUEndTime];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [[self rootCommandBuffer] addCompletedHandler:block];
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [[self rootCommandBuffer] encodeSignalEvent:event value:value];
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [[self rootCommandBuffer] encodeWaitForEvent:event value:value];
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [[self rootCommandBuffer] addScheduledHandler:block];
}
- (void)enqueue {
  [[self rootCommandBuffer] enqueue];
}
- (void)commit {
  [[self rootCommandBuffer] commit];
}
- (void)commitAndContinue {  // with another root
}
- (void)waitUntilCompleted {
  not_ours("waitUntilCompleted");
}
@end

// The buffers of a stream, one after the other.
@interface SimulatorBuffers : MPSCommandBuffer {
 @public
  simulator::StreamNumber stream;
}
@end
@implementation SimulatorBuffers
- (id<MTLCommandBuffer>)rootCommandBuffer {
  const std::shared_ptr<simulator::CommandBuffer> open = simulator::open_buffer(stream);
  if (!open->object) {
    @autoreleasepool {
      [(SimulatorCommandBuffer*)simulated_command_buffer(simulator::encoding_of(stream)) keep];
    }
  }
  return (id<MTLCommandBuffer>)open->object.get();
}
- (void)commitAndContinue {
  only_torch("commitAndContinue");
  simulator::commit(stream);
}
@end

static id<MTLCommandBuffer> simulated_command_buffer(const std::shared_ptr<simulator::Encoding>& encoding) {
  SimulatorCommandBuffer* made = [[SimulatorCommandBuffer new] autorelease];
  made->encoding = new std::shared_ptr<simulator::Encoding>(encoding);
  made->buffer = new std::shared_ptr<simulator::CommandBuffer>(encoding->open);
  return made;
}

id<MTLDevice> simulated_device() {
  static SimulatorDevice* device = [SimulatorDevice new];
  return device;
}
static MPSCommandBuffer* simulated_buffers(simulator::StreamNumber stream) {
  SimulatorBuffers* made = [[SimulatorBuffers new] autorelease];
  made->stream = stream;
  return made;
}
static id<MTLCommandQueue> simulated_new_queue(simulator::StreamNumber stream, bool is_hosts) {
  SimulatorCommandQueue* queue = [SimulatorCommandQueue new];
  queue->stream = stream;
  queue->is_hosts = is_hosts;
  return queue;
}
id<MTLCommandQueue> simulated_queue(simulator::StreamNumber stream) {
  const id<MTLCommandQueue> queue = simulated_new_queue(stream);
  simulator::keep_for_the_process(queue);
  return queue;
}

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  if (simulator::is_strict())
    fail("MTLCreateSystemDefaultDevice: host code uses PyTorch's device, stream->device()");
  return simulated_device();
}
