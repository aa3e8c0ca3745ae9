// The formats of quantised weights by name: what the operators' `mode`, `bits` and `group_size` select.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "metal/library.h"

namespace moe_mps {

struct WeightFormat {
  std::string mode;
  int64_t bits;
  int64_t group_size;

  std::string name() const;  // "affine4_64", "mxfp4"
  // Whether dot products take two pairs at a time: kPairs of shaders/matmul/formats.h.
  bool shares_rows() const { return mode != "affine" || bits % 4 == 0; }

  // The same but for what is given; another mode starts from its defaults.
  WeightFormat replaced(std::optional<int64_t> bits_, std::optional<int64_t> group_size_,
                        std::optional<std::string_view> mode_) const;
};

const std::vector<WeightFormat>& all_formats();

// shaders/quantized.metal for a format.
Library quantized_library(const WeightFormat& format, c10::ScalarType dtype);

}  // namespace moe_mps
