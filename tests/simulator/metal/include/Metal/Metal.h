// The part of Metal that PyTorch's public headers name and that host code of this package may use.
#pragma once
#include <Foundation/Foundation.h>

typedef struct {
  NSUInteger width, height, depth;
} MTLSize;
static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
  MTLSize size = {width, height, depth};
  return size;
}

typedef struct {
  uint32_t threadgroupsPerGrid[3];
} MTLDispatchThreadgroupsIndirectArguments;

typedef enum MTLBarrierScope : NSUInteger { MTLBarrierScopeBuffers = 1 } MTLBarrierScope;
typedef enum MTLGPUFamily : NSInteger {
  MTLGPUFamilyApple7 = 1007,
  MTLGPUFamilyApple8,
  MTLGPUFamilyApple9,
  MTLGPUFamilyApple10,
} MTLGPUFamily;
typedef enum MTLLanguageVersion : NSUInteger {
  MTLLanguageVersion2_4 = (2 << 16) + 4,
  MTLLanguageVersion3_0 = 3 << 16,
  MTLLanguageVersion3_1 = (3 << 16) + 1,
  MTLLanguageVersion3_2 = (3 << 16) + 2,
  MTLLanguageVersion4_0 = (4 << 16) + 0,
} MTLLanguageVersion;
typedef enum MTLMathMode : NSInteger { MTLMathModeSafe, MTLMathModeRelaxed, MTLMathModeFast } MTLMathMode;
typedef enum MTLMathFloatingPointFunctions : NSInteger {
  MTLMathFloatingPointFunctionsFast,
  MTLMathFloatingPointFunctionsPrecise
} MTLMathFloatingPointFunctions;

typedef enum MTLStorageMode : NSUInteger {
  MTLStorageModeShared = 0,
  MTLStorageModePrivate = 2
} MTLStorageMode;
typedef enum MTLHazardTrackingMode : NSUInteger {
  MTLHazardTrackingModeDefault,
  MTLHazardTrackingModeUntracked,
  MTLHazardTrackingModeTracked,
} MTLHazardTrackingMode;
typedef enum MTLResourceOptions : NSUInteger {
  MTLResourceStorageModeShared = 0,
  MTLResourceHazardTrackingModeDefault = 0,
} MTLResourceOptions;
typedef enum MTLHeapType : NSInteger { MTLHeapTypeAutomatic, MTLHeapTypePlacement } MTLHeapType;

typedef struct {
  NSUInteger size, align;
} MTLSizeAndAlign;

@protocol MTLDevice
, MTLBuffer, MTLLibrary, MTLFunction, MTLComputePipelineState, MTLCommandQueue, MTLCommandBuffer,
    MTLComputeCommandEncoder, MTLBlitCommandEncoder, MTLEvent, MTLSharedEvent, MTLHeap, MTLResidencySet;
typedef void (^MTLCommandBufferHandler)(id<MTLCommandBuffer>);

@interface MTLCompileOptions : NSObject {
  MTLLanguageVersion _version;
  MTLMathMode _mathMode;
  MTLMathFloatingPointFunctions _functions;
}
@property(nonatomic) MTLLanguageVersion languageVersion;
@property(nonatomic) MTLMathMode mathMode;                                      // macOS 15
@property(nonatomic) MTLMathFloatingPointFunctions mathFloatingPointFunctions;  // macOS 15
@property(nonatomic) BOOL fastMathEnabled;  // the older name: YES is MTLMathModeFast, NO is MTLMathModeSafe
@end

@interface MTLHeapDescriptor : NSObject {
  NSUInteger _size;
  MTLHeapType _type;
  MTLStorageMode _storageMode;
  MTLHazardTrackingMode _hazardTrackingMode;
}
@property(nonatomic) NSUInteger size;
@property(nonatomic) MTLHeapType type;
@property(nonatomic) MTLStorageMode storageMode;  // MTLStorageModePrivate unless it is set
@property(nonatomic) MTLHazardTrackingMode hazardTrackingMode;
@end

@protocol MTLHeap <NSObject>
@property(readonly) NSUInteger size;
@property(readonly) NSUInteger usedSize;
@property(readonly) NSUInteger currentAllocatedSize;
@property(readonly) MTLHeapType type;
@property(readonly) MTLStorageMode storageMode;
- (NSUInteger)maxAvailableSizeWithAlignment:(NSUInteger)alignment;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;  // or nil
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length
                             options:(MTLResourceOptions)options
                              offset:(NSUInteger)offset;  // of a heap for placement
@end

@protocol MTLBuffer <NSObject>
@property(readonly) NSUInteger length;
@property(readonly) MTLStorageMode storageMode;
@property(readonly) id<MTLHeap> heap;  // nil for a buffer that stands alone
@property(readonly) NSUInteger heapOffset;
- (void*)contents;  // null where it is private
@end

@protocol MTLFunction <NSObject>
@property(readonly) NSString* name;
@end

@protocol MTLLibrary <NSObject>
@property(readonly) NSArray<NSString*>* functionNames;
- (id<MTLFunction>)newFunctionWithName:(NSString*)name;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end

@protocol MTLComputeCommandEncoder <NSObject>
- (void)endEncoding;
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBuffers:(const id<MTLBuffer>[])buffers
           offsets:(const NSUInteger[])offsets
         withRange:(NSRange)range;
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreads:(MTLSize)threadsPerGrid threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
- (void)dispatchThreadgroups:(MTLSize)threadgroupsPerGrid
       threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
- (void)dispatchThreadgroupsWithIndirectBuffer:(id<MTLBuffer>)indirectBuffer
                          indirectBufferOffset:(NSUInteger)indirectBufferOffset
                         threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope;
@end

@protocol MTLBlitCommandEncoder <NSObject>
- (void)copyFromBuffer:(id<MTLBuffer>)sourceBuffer
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destinationBuffer
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size;
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value;
- (void)endEncoding;
@end

typedef enum MTLCommandBufferStatus : NSUInteger {
  MTLCommandBufferStatusNotEnqueued,
  MTLCommandBufferStatusEnqueued,
  MTLCommandBufferStatusCommitted,
  MTLCommandBufferStatusScheduled,
  MTLCommandBufferStatusCompleted,
  MTLCommandBufferStatusError,
} MTLCommandBufferStatus;
typedef enum MTLCommandBufferError : NSUInteger {
  MTLCommandBufferErrorTimeout = 2,
  MTLCommandBufferErrorPageFault = 3,
  MTLCommandBufferErrorAccessRevoked = 4,
  MTLCommandBufferErrorOutOfMemory = 8,
} MTLCommandBufferError;

@protocol MTLCommandBuffer <NSObject>
@property(readonly) MTLCommandBufferStatus status;
@property(readonly) NSError* error;
@property(readonly) double GPUStartTime;  // seconds, once it is complete
@property(readonly) double GPUEndTime;
- (void)addScheduledHandler:(MTLCommandBufferHandler)block;
- (void)addCompletedHandler:(MTLCommandBufferHandler)block;
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value;
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value;
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (id<MTLBlitCommandEncoder>)blitCommandEncoder;
- (void)enqueue;
- (void)commit;
- (void)waitUntilCompleted;
@end

@protocol MTLEvent <NSObject>
@end

@interface MTLSharedEventListener : NSObject  // whose blocks run on a queue of its own
@end
typedef void (^MTLSharedEventNotificationBlock)(id<MTLSharedEvent>, uint64_t value);

@protocol MTLSharedEvent <MTLEvent>
@property uint64_t signaledValue;
- (void)notifyListener:(MTLSharedEventListener*)listener
               atValue:(uint64_t)value
                 block:(MTLSharedEventNotificationBlock)block;
- (BOOL)waitUntilSignaledValue:(uint64_t)value timeoutMS:(uint64_t)milliseconds;  // macOS 12
@end

@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBuffer;
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences;
@end

@interface MTLResidencySetDescriptor : NSObject {
  NSUInteger _capacity;
}
@property(nonatomic) NSUInteger initialCapacity;
@end

@protocol MTLResidencySet <NSObject>  // macOS 15
- (void)addAllocation:(id)allocation;
- (void)removeAllocation:(id)allocation;
- (void)removeAllAllocations;
- (void)commit;
- (void)requestResidency;
- (void)endResidency;
@end

@protocol MTLDevice <NSObject>
@property(readonly) NSString* name;
@property(readonly) NSUInteger maxThreadgroupMemoryLength;
@property(readonly) NSUInteger maxBufferLength;
@property(readonly) uint64_t recommendedMaxWorkingSetSize;
@property(readonly) NSUInteger currentAllocatedSize;
@property BOOL shouldMaximizeConcurrentCompilation;  // macOS 13.3
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (id)newTensorWithDescriptor:(id)descriptor error:(NSError**)error;  // macOS 26
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor
                                               error:(NSError**)error;  // macOS 15
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void* pointer, NSUInteger length))deallocator;
- (MTLSizeAndAlign)heapBufferSizeAndAlignWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLHeap>)newHeapWithDescriptor:(MTLHeapDescriptor*)descriptor;
- (id<MTLSharedEvent>)newSharedEvent;
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error;
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError**)error;
@end

extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice(void);
