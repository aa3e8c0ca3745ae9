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
    constexpr const char *kFloats = "matmul/formats/floats", *kGgml = "matmul/formats/ggml",
                         *kLevels = "matmul/formats/levels", *kPoints = "matmul/formats/points";
    constexpr std::tuple<const char*, int64_t, const char*, const char*> kNamed[] = {
        {"q4_0", 4, "Q4_0", kGgml},         {"q4_1", 4, "Q4_1", kGgml},
        {"q5_0", 5, "Q5_0", kGgml},         {"q5_1", 5, "Q5_1", kGgml},
        {"q8_0", 8, "Q8_0", kGgml},         {"q2_k", 2, "Q2_K", kGgml},
        {"q3_k", 3, "Q3_K", kGgml},         {"q4_k", 4, "Q4_K", kGgml},
        {"q5_k", 5, "Q5_K", kGgml},         {"q6_k", 6, "Q6_K", kGgml},
        {"iq4_nl", 4, "IQ4_NL", kLevels},   {"iq4_xs", 4, "IQ4_XS", kLevels},
        {"tq2_0", 2, "TQ2_0", kGgml},       {"iq1_s", 1, "IQ1_S", kPoints},
        {"iq1_m", 1, "IQ1_M", kPoints},     {"iq2_xxs", 2, "IQ2_XXS", kPoints},
        {"iq2_xs", 2, "IQ2_XS", kPoints},   {"iq2_s", 2, "IQ2_S", kPoints},
        {"iq3_xxs", 3, "IQ3_XXS", kPoints}, {"iq3_s", 3, "IQ3_S", kPoints}};
    constexpr std::tuple<const char*, int64_t, const char*, int64_t> kOfFloats[] = {
        {"mxfp4", 4, "Mxfp4", 32}, {"mxfp8", 8, "Mxfp8", 32}, {"nvfp4", 4, "Nvfp4", 16}};
    for (const auto& [name, bits, type, group] : kOfFloats) {
      list->push_back({name, bits, c10::str(type, "<MOE_DTYPE>"), kFloats, false, group});
    }
    for (const auto& [name, bits, type, header] : kNamed) {
      list->push_back({name, bits, c10::str(type, "<MOE_DTYPE>"), header, false});
    }
    for (const int64_t bits : {4, 2, 3, 5, 6, 8}) {
      for (const int64_t group : {64, 32, 128}) {
        list->push_back({c10::str("affine", bits, "_", group), bits,
                         c10::str("Affine<MOE_DTYPE, ", bits, ", ", group, ">"), "matmul/formats/affine",
                         true, group});
      }
    }
    return list;
  }();
  return *formats;
}

Library quantized_library(const WeightFormat& format, c10::ScalarType dtype) {
  return {"quantized", dtype, format.name, format.type, format.header, format.norms_inputs()};
}

Library tensor_units_library(const Library& library) {
  if (!library.weights.empty())
    return {"tensor_units", library.dtype, library.weights, library.weights_type, library.weights_header};
  return {"tensor_units", library.dtype, "dense", "Dense<MOE_DTYPE>", "matmul/formats/dense"};
}

Library quantized_attention_library(c10::ScalarType dtype) {
  return {"attention", dtype, "affine8", "QuantizedCache<MOE_DTYPE>", "attention/quantized_cache"};
}

}  // namespace moe_mps
