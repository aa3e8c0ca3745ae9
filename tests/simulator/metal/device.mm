// MTLDevice, MTLCommandQueue and MTLCommandBuffer as host code sees them: the stream is PyTorch's, so what
// would create or drive another one is a finding.
#import <Metal/Metal.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

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
@implementation SimulatorDevice
- (NSString*)name {
  const char* name = std::getenv("SIMULATED_GPU");
  return name == nullptr ? @"Simulated Apple GPU" : [NSString stringWithUTF8String:name];
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return simulator::kMaxThreadgroupMemory;
}
- (BOOL)shouldMaximizeConcurrentCompilation {
  return maximize_concurrent_compilation;
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)maximize {
  maximize_concurrent_compilation = maximize;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  const bool has_tensor_units = std::strstr([[self name] UTF8String], "M5") != nullptr;
  return family <= (has_tensor_units ? MTLGPUFamilyApple10 : MTLGPUFamilyApple9);
}
- (BOOL)respondsToSelector:(SEL)selector {
  const char* macos = std::getenv("SIMULATED_MACOS");
  if (sel_isEqual(selector, @selector(newTensorWithDescriptor:error:)))
    return macos == nullptr || std::atoi(macos) >= 26;
  if (sel_isEqual(selector, @selector(newResidencySetWithDescriptor:error:)))
    return macos == nullptr || std::atoi(macos) >= 15;
  return [super respondsToSelector:selector];
}
- (id)newTensorWithDescriptor:(id)descriptor error:(NSError**)error {
  fail("newTensorWithDescriptor is not simulated");
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor
                                               error:(NSError**)error {
  return simulated_residency_set(descriptor);
}
- (id<MTLCommandQueue>)newCommandQueue {
  not_ours("newCommandQueue");
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
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  if (simulator::is_strict()) not_ours("computeCommandEncoder");
  return simulated_encoder();
}
// Nothing runs before it is waited for: a commit changes nothing that could be seen.
- (void)commit {
  if (simulator::is_strict()) not_ours("commit");
}
- (void)commitAndContinue {
  if (simulator::is_strict()) not_ours("commitAndContinue");
}
- (void)waitUntilCompleted {
  not_ours("waitUntilCompleted");
}
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
  if (simulator::is_strict())
    fail("MTLCreateSystemDefaultDevice: host code uses PyTorch's device, stream->device()");
  return simulated_device();
}
