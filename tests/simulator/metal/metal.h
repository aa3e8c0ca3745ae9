// The Objective-C objects that make up the simulated device.
#pragma once
#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include "../msl/executor.h"
#include "runtime.h"

@interface SimulatorPipeline : NSObject <MTLComputePipelineState> {
 @public
  const msl_kernel* kernel;
}
@end

id<MTLDevice> simulated_device();
id<MTLCommandQueue> simulated_queue(simulator::StreamNumber stream);
// Autoreleased; raise while the command buffer has another one.
id<MTLComputeCommandEncoder> simulated_compute_encoder(const std::shared_ptr<simulator::Encoding>& encoding);
id<MTLBlitCommandEncoder> simulated_blit_encoder(const std::shared_ptr<simulator::Encoding>& encoding);
// The memory of a heap's buffer goes back to it with the last reference.
id<MTLBuffer> simulated_buffer(std::shared_ptr<simulator::Memory> memory, id<MTLHeap> heap,
                               NSUInteger offset);
void simulated_give_back(id<MTLHeap> heap, NSUInteger offset);
id<MTLHeap> simulated_new_heap(MTLHeapDescriptor* descriptor);
bool simulated_is_heap(const void* object);
id<MTLLibrary> simulated_library(NSString* source, MTLCompileOptions* options, NSError** error);
// Of a file that stands for a .metallib: the line "simulated metallib", and the source.
id<MTLLibrary> simulated_compiled_library(NSURL* url, NSError** error);
id<MTLSharedEvent> simulated_shared_event();
// A command: the GPU signals an event, or waits for one.
void simulated_signal(id<MTLEvent> event, uint64_t value, simulator::Encoding& into);
void simulated_wait(id<MTLEvent> event, uint64_t value, simulator::Encoding& into);
id<MTLResidencySet> simulated_residency_set(MTLResidencySetDescriptor* descriptor);
// The heap that a new buffer of so many bytes lies in; nil where it stands alone.
id<MTLHeap> simulated_heap(size_t bytes);
id<MTLComputePipelineState> simulated_pipeline(id<MTLFunction> function, NSError** error);

// The encoder of the dispatch_sync block that the calling thread is in. Raises outside of any block.
id<MTLComputeCommandEncoder> simulated_encoder(simulator::StreamNumber stream);
