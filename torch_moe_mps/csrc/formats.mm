#include "formats.h"

#include <c10/util/StringUtil.h>

namespace moe_mps {
namespace {

// The template of shaders/matmul/formats.h.
std::string metal_template(const WeightFormat& format) {
  if (format.mode == "affine")
    return c10::str("Affine<MOE_DTYPE, ", format.bits, ", ", format.group_size, ">");
  if (format.mode == "mxfp4") return "Mxfp4<MOE_DTYPE>";
  return format.mode == "mxfp8" ? "Mxfp8<MOE_DTYPE>" : "Nvfp4<MOE_DTYPE>";
}

}  // namespace

std::string WeightFormat::name() const {
  return mode == "affine" ? c10::str(mode, bits, "_", group_size) : mode;
}

WeightFormat WeightFormat::replaced(std::optional<int64_t> bits_, std::optional<int64_t> group_size_,
                                    std::optional<std::string_view> mode_) const {
  WeightFormat other = *this;
  if (mode_ && *mode_ != mode) {
    if (*mode_ == "affine") {
      other = {"affine", 4, 64};
    } else {
      for (const WeightFormat& format : all_formats()) {
        if (format.mode == *mode_) other = format;
      }
    }
  }
  other.bits = bits_.value_or(other.bits);
  other.group_size = group_size_.value_or(other.group_size);
  return other;
}

const std::vector<WeightFormat>& all_formats() {
  static const auto* const formats = [] {
    auto* list = new std::vector<WeightFormat>{{"mxfp4", 4, 32}, {"mxfp8", 8, 32}, {"nvfp4", 4, 16}};
    for (const int64_t bits : {2, 3, 4, 5, 6, 8}) {
      for (const int64_t group_size : {32, 64, 128}) list->push_back({"affine", bits, group_size});
    }
    return list;
  }();
  return *formats;
}

Library quantized_library(const WeightFormat& format, c10::ScalarType dtype) {
  return {"quantized", dtype, format.name(), metal_template(format)};
}

}  // namespace moe_mps
