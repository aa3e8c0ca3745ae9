// Metal libraries and pipelines: built from the package's shader text on first use, kept for the process.
#pragma once
#import <Metal/Metal.h>

#include <cstdint>
#include <string>
#include <vector>

namespace moe_mps {

// The value of one [[function_constant(index)]].
struct Constant {
  static Constant boolean(uint16_t index, bool value) { return {index, MTLDataTypeBool, value}; }
  static Constant integer(uint16_t index, int32_t value) {
    return {index, MTLDataTypeInt, static_cast<uint32_t>(value)};
  }

  uint16_t index;
  MTLDataType type;
  uint32_t bits;
};
using Constants = std::vector<Constant>;

// The pipeline of `function` in shaders/<library>.metal, specialised for `constants`. Thread-safe. Raises
// with Metal's own message when the source does not compile.
id<MTLComputePipelineState> pipeline(id<MTLDevice> device, const std::string& library,
                                     const std::string& function, const Constants& constants);

}  // namespace moe_mps
