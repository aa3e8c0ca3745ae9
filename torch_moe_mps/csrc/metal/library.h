// Metal libraries and pipelines: built from the package's shader text on first use, or read where a release
// has compiled that very text. Pipelines are kept for the process, of libraries the newest.
#pragma once
#include <c10/core/ScalarType.h>
#import <Metal/Metal.h>

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

namespace moe_mps {

// A .metal file compiled for one dtype and, where it takes one, one format of weights: a model needs few of
// all combinations, and each takes Metal's compiler seconds. The shader sees the type as MOE_DTYPE, the
// format's type as MOE_WEIGHTS, and ends the names of its functions with MOE_SUFFIX. The texts that it names
// are never freed.
struct Library {
  const char* file;  // shaders/<file>.metal
  c10::ScalarType dtype;
  std::string_view weights = {};       // the format's name
  std::string_view weights_type = {};  // its type,
  const char* weights_header = "";     // and what defines that: shaders/<weights_header>.h
  bool norms_inputs = true;            // the format does; the shader sees MOE_WIDE_NORMS or MOE_NORMS_APART
  // Of attention: for values of heads of up to so many elements. Of routing: for so many experts of a lane.
  // The shader sees MOE_WIDTH.
  int64_t width = 0;

  std::string suffix() const;  // "_bf16", "_affine4_64_bf16"
  // Whether it needs Metal 4.0, for tensor units. All others are 3.1.
  bool has_tensors() const { return std::string_view(file) == "tensor_units"; }
  std::string name() const;  // "norms_bf16", "attention_128_affine8_bf16", "routing_4_f32"
};

// A compiled kernel, and the limits of its launches.
struct Pipeline {
  std::string name;
  id<MTLComputePipelineState> state;
  NSUInteger most_threads;            // in a threadgroup
  NSUInteger static_bytes;            // threadgroup memory that the kernel declares
  NSUInteger most_bytes;              // threadgroup memory that the GPU has
  std::atomic<NSUInteger>* launched;  // the most threads of a threadgroup that a plan asked for; never freed
};

// The pipeline of `function` + library.suffix(). Thread-safe; different libraries and functions are compiled
// side by side. Raises with Metal's own message when the source does not compile. The reference stays good.
const Pipeline& pipeline(const Library& library, std::string_view function);

// Kernels that measure a GPU; no operator launches them.
const Library& probe_library();

// Every other library that the package can build.
const std::vector<Library>& all_libraries();

}  // namespace moe_mps
