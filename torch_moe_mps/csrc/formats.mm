#include "formats.h"

#include <c10/util/StringUtil.h>

namespace moe_mps {
namespace {

// The template of shaders/experts/formats.h.
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
