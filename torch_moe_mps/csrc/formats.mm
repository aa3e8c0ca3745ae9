#include "formats.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <tuple>

namespace moe_mps {

const WeightFormat& weight_format(std::string_view name) {
  for (const WeightFormat& format : all_formats()) {
    if (format.name == name) return format;
  }
  TORCH_CHECK(false, "moe_mps: no kernel for weights of format ", name);
}

const std::vector<WeightFormat>& all_formats() {
  static const auto* const formats = [] {
    auto* list = new std::vector<WeightFormat>;
    constexpr std::tuple<const char*, int64_t, const char*> kNamed[] = {
        {"mxfp4", 4, "Mxfp4"}, {"mxfp8", 8, "Mxfp8"},     {"nvfp4", 4, "Nvfp4"},     {"q4_0", 4, "Q4_0"},
        {"q4_1", 4, "Q4_1"},   {"q5_0", 5, "Q5_0"},       {"q5_1", 5, "Q5_1"},       {"q8_0", 8, "Q8_0"},
        {"q2_k", 2, "Q2_K"},   {"q3_k", 3, "Q3_K"},       {"q4_k", 4, "Q4_K"},       {"q5_k", 5, "Q5_K"},
        {"q6_k", 6, "Q6_K"},   {"iq4_nl", 4, "IQ4_NL"},   {"iq4_xs", 4, "IQ4_XS"},   {"tq2_0", 2, "TQ2_0"},
        {"iq1_s", 1, "IQ1_S"}, {"iq1_m", 1, "IQ1_M"},     {"iq2_xxs", 2, "IQ2_XXS"}, {"iq2_xs", 2, "IQ2_XS"},
        {"iq2_s", 2, "IQ2_S"}, {"iq3_xxs", 3, "IQ3_XXS"}, {"iq3_s", 3, "IQ3_S"}};
    for (const auto& [name, bits, type] : kNamed) {
      list->push_back({name, bits, c10::str(type, "<MOE_DTYPE>"), false});
    }
    for (const int64_t bits : {4, 2, 3, 5, 6, 8}) {
      for (const int64_t group : {64, 32, 128}) {
        list->push_back({c10::str("affine", bits, "_", group), bits,
                         c10::str("Affine<MOE_DTYPE, ", bits, ", ", group, ">"), true});
      }
    }
    return list;
  }();
  return *formats;
}

Library quantized_library(const WeightFormat& format, c10::ScalarType dtype) {
  return {"quantized", dtype, format.name, format.type, format.norms_inputs()};
}

Library tensor_units_library(const Library& library) {
  if (!library.weights.empty()) return {"tensor_units", library.dtype, library.weights, library.weights_type};
  return {"tensor_units", library.dtype, "dense", "Dense<MOE_DTYPE>"};
}

Library quantized_attention_library(c10::ScalarType dtype) {
  return {"attention", dtype, "affine8", "QuantizedCache<MOE_DTYPE>"};
}

}  // namespace moe_mps
