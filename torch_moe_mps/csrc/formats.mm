#include "formats.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace moe_mps {

const WeightFormat& weight_format(std::string_view name) {
  for (const WeightFormat& format : all_formats()) {
    if (format.name == name) return format;
  }
  TORCH_CHECK(false, "moe_mps: no kernel for weights of format ", name);
}

const std::vector<WeightFormat>& all_formats() {
  static const auto* const formats = [] {
    auto* list = new std::vector<WeightFormat>{{"mxfp4", 4, 32, "Mxfp4<MOE_DTYPE>"},
                                               {"mxfp8", 8, 32, "Mxfp8<MOE_DTYPE>"},
                                               {"nvfp4", 4, 16, "Nvfp4<MOE_DTYPE>"}};
    for (const int64_t bits : {4, 2, 3, 5, 6, 8}) {
      for (const int64_t group : {64, 32, 128}) {
        list->push_back({c10::str("affine", bits, "_", group), bits, group,
                         c10::str("Affine<MOE_DTYPE, ", bits, ", ", group, ">")});
      }
    }
    return list;
  }();
  return *formats;
}

Library quantized_library(const WeightFormat& format, c10::ScalarType dtype) {
  return {"quantized", dtype, format.name, format.type};
}

Library tensor_units_library(const Library& library, bool transposed) {
  if (!library.weights.empty()) return {"tensor_units", library.dtype, library.weights, library.weights_type};
  if (transposed) return {"tensor_units", library.dtype, "dense_transposed", "DenseColumns<MOE_DTYPE>"};
  return {"tensor_units", library.dtype, "dense", "Dense<MOE_DTYPE>"};
}

Library quantized_attention_library(c10::ScalarType dtype) {
  return {"attention", dtype, "affine8", "QuantizedCache<MOE_DTYPE>"};
}

}  // namespace moe_mps
