// The names that PyTorch's MPS headers mention.
#pragma once
#include <Metal/Metal.h>

typedef enum MPSDataType : uint32_t {
  MPSDataTypeInvalid = 0,
  MPSDataTypeFloat32 = 0x10000000 | 32
} MPSDataType;
typedef NSArray<NSNumber*> MPSShape;
@interface MPSKernel : NSObject
@end
@interface MPSNDArray : NSObject
@end
@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
@property(readonly) id<MTLCommandBuffer> commandBuffer;
- (void)commitAndContinue;
@end
