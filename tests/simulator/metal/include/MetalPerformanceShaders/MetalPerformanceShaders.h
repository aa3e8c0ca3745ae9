// What PyTorch's MPS headers name.
#pragma once
#include <Metal/Metal.h>

@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
@property(readonly) id<MTLCommandBuffer> commandBuffer;
- (void)commitAndContinue;
@end
