// The names that PyTorch's MPS headers mention.
#pragma once
#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

@interface MPSGraphObject : NSObject
@end
@interface MPSGraph : MPSGraphObject
@end
@interface MPSGraphTensor : MPSGraphObject <NSCopying>
@end
@interface MPSGraphTensorData : MPSGraphObject
@end
@interface MPSGraphExecutable : MPSGraphObject
@end
@interface MPSGraphExecutionDescriptor : MPSGraphObject
@end
@interface MPSGraphCompilationDescriptor : MPSGraphObject
@end
