// Metal libraries and pipelines: built from the package's shader text on first use, kept for the process.
#pragma once
#import <Metal/Metal.h>

#include <string>
#include <vector>

namespace moe_mps {

// The pipeline of `function` in shaders/<library>.metal. Thread-safe. Raises with Metal's own message when
// the source does not compile.
id<MTLComputePipelineState> pipeline(id<MTLDevice> device, const std::string& library,
                                     const std::string& function);

// The functions of shaders/<library>.metal, in Metal's order.
std::vector<std::string> functions_of(id<MTLDevice> device, const std::string& library);

}  // namespace moe_mps
