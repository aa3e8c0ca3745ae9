// MTLDevice, MTLCommandQueue and MTLCommandBuffer as host code sees them: the stream is PyTorch's, so what
// would create or drive another one is a finding.
#import <Metal/Metal.h>
#import <MetalPerformanceShadersGraph/MetalPerformanceShadersGraph.h>

#include <cstdlib>
#include <string>

#include "metal.h"
#include "runtime.h"

using simulator::fail;

namespace {
[[noreturn]] void not_ours(const char* method) {
  fail(std::string(method) +
       ": host code encodes with stream->commandEncoder() only; queues, command buffers, other "
       "encoders, commit and wait belong to PyTorch's stream");
}
}  // namespace

@interface SimulatorDevice : NSObject <MTLDevice>
@end
@implementation SimulatorDevice
- (NSString*)name {
  const char* name = std::getenv("SIMULATED_GPU");
  return name == nullptr ? @"Simulated Apple GPU" : [NSString stringWithUTF8String:name];
}
- (NSUInteger)maxBufferLength {
  return NSUInteger{64} << 30;
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return simulator::kMaxThreadgroupMemory;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(1024, 1024, 1024);
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return uint64_t{64} << 30;
}
- (NSUInteger)currentAllocatedSize {
  return simulator::live_bytes();
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return family <= MTLGPUFamilyApple9;
}
- (id<MTLCommandQueue>)newCommandQueue {
  not_ours("newCommandQueue");
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0) fail("newBufferWithLength: length is 0");
  return (id<MTLBuffer>)simulator::buffer_new(length);
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error {
  return simulated_library(source, options, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError**)error {
  return simulated_pipeline(function, error);
}
@end

@interface SimulatorCommandQueue : NSObject <MTLCommandQueue>
@end
@implementation SimulatorCommandQueue
- (id<MTLCommandBuffer>)commandBuffer {
  not_ours("[commandQueue commandBuffer]");
}
@end

@implementation MPSCommandBuffer
- (id<MTLCommandBuffer>)commandBuffer {
  return self;
}
- (MTLCommandBufferStatus)status {
  return MTLCommandBufferStatusNotEnqueued;
}
- (NSError*)error {
  return nil;
}
- (NSString*)label {
  return nil;
}
- (void)setLabel:(NSString*)label {
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  not_ours("computeCommandEncoder");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)dispatchType {
  not_ours("computeCommandEncoderWithDispatchType");
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  not_ours("blitCommandEncoder");
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  not_ours("addCompletedHandler");
}
- (void)commit {
  not_ours("commit");
}
- (void)commitAndContinue {
  not_ours("commitAndContinue");
}
- (void)waitUntilCompleted {
  not_ours("waitUntilCompleted");
}
@end

// Named by PyTorch's headers only.
@implementation MPSGraphObject
@end
@implementation MPSGraph
@end
@implementation MPSGraphExecutionDescriptor
@end
@implementation MPSGraphCompilationDescriptor
@end

id<MTLDevice> simulated_device() {
  static SimulatorDevice* device = [SimulatorDevice new];
  return device;
}
id<MTLCommandQueue> simulated_queue() {
  static SimulatorCommandQueue* queue = [SimulatorCommandQueue new];
  return queue;
}
MPSCommandBuffer* simulated_command_buffer() {
  static MPSCommandBuffer* buffer = [MPSCommandBuffer new];
  return buffer;
}

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  fail("MTLCreateSystemDefaultDevice: host code uses PyTorch's device, stream->device()");
}
