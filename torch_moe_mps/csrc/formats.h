// The formats of quantised weights by name: what the operators' `format` selects.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "metal/library.h"

namespace moe_mps {

// A row of _weight_formats.py.
struct WeightFormat {
  std::string name;  // "affine4_64", "mxfp4"
  int64_t bits, group_size;
  std::string type, header;      // shaders/<header>.h has the type
  bool scales_like_activations;  // MLX's affine formats have scales in the dtype of a model

  // Whether a norm within the matmul of one token costs less than a launch. By the cost model, memory limits
  // the kernel from 3 bits on, which hides the norm; with 2 bits, instruction issue would limit it.
  bool norms_inputs() const { return bits >= 3; }
};

const WeightFormat& weight_format(std::string_view name);

const std::deque<WeightFormat>& all_formats();

// shaders/quantized.metal for a format.
Library quantized_library(const WeightFormat& format, c10::ScalarType dtype);

// shaders/quantized_<part>.metal for the weights of a library; dense ones have all kernels in one.
Library part_of(Library library, const char* file);
constexpr const char *kJoined = "quantized_joined", *kOfFew = "quantized_few",
                     *kOfPrompts = "quantized_prompts", *kOfHeads = "quantized_heads",
                     *kVariants = "quantized_variants";

// shaders/tensor_units.metal for the weights of another library.
Library tensor_units_library(const Library& library);

}  // namespace moe_mps
