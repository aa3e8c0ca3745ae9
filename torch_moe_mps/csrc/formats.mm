#include "formats.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <tuple>

namespace moe_mps {
namespace {

// Templates of shaders, and the files that have them.
struct Kind {
  const char *type, *header;
};
constexpr Kind kFloats{"FloatCodes", "matmul/formats/floats"};
constexpr Kind kHalf{"Integers", "matmul/formats/typed_scales"};
constexpr Kind kSmall{"Integers", "matmul/formats/small_scales"};
constexpr Kind kLevels{"LevelCodes", "matmul/formats/levels"};
constexpr Kind kPoints{"GridCodes", "matmul/formats/points"};

}  // namespace

const WeightFormat& weight_format(std::string_view name) {
  for (const WeightFormat& format : all_formats()) {
    if (format.name == name) return format;
  }
  TORCH_CHECK(false, "moe_mps: no kernel for weights of format ", name);
}

const std::vector<WeightFormat>& all_formats() {
  static const auto* const formats = [] {
    auto* list = new std::vector<WeightFormat>;
    // The template's arguments behind the dtype, and the group size. Levels have no offset; the 1 says that
    // they have no bias.
    constexpr std::tuple<const char*, int64_t, Kind, const char*, int64_t> kNamed[] = {
        {"mxfp4", 4, kFloats, "E2M1, ScaleE8M0, 32", 32},
        {"mxfp8", 8, kFloats, "E4M3, ScaleE8M0, 32", 32},
        {"nvfp4", 4, kFloats, "E2M1, ScaleE4M3, 16", 16},
        {"q1_0", 1, kHalf, "1, SignScales<128>", 0},
        {"q2_0", 2, kHalf, "2, TypedScales<half, 64, 1>", 0},
        {"q4_0", 4, kHalf, "4, TypedScales<half, 32, 8>", 0},
        {"q4_1", 4, kHalf, "4, TypedScales<half, 32, 0>", 0},
        {"q5_0", 5, kHalf, "5, TypedScales<half, 32, 16>", 0},
        {"q5_1", 5, kHalf, "5, TypedScales<half, 32, 0>", 0},
        {"q8_0", 8, kHalf, "8, TypedScales<half, 32, 128>", 0},
        {"q2_k", 2, kSmall, "2, SmallScales<16, 4, true, 0, 0>", 0},
        {"q3_k", 3, kSmall, "3, SmallScales<16, 6, false, 32, 4>", 0},
        {"q4_k", 4, kSmall, "4, SmallScales<32, 6, true, 0, 0>", 0},
        {"q5_k", 5, kSmall, "5, SmallScales<32, 6, true, 0, 0>", 0},
        {"q6_k", 6, kSmall, "6, SmallScales<16, 8, false, 128, 32>", 0},
        {"iq4_nl", 4, kLevels, "TypedScales<half, 32, 1>", 0},
        {"iq4_xs", 4, kLevels, "SmallScales<32, 6, false, 32, 1>", 0},
        {"tq2_0", 2, kSmall, "2, SmallScales<32, 0, false, 0, 1>", 0},
        {"iq1_s", 1, kPoints, "1, 32, 3, 3, 16", 0},
        {"iq1_m", 1, kPoints, "1, 16, 3, 3, 22", 0},
        {"iq2_xxs", 2, kPoints, "2, 32, 4, 0, 0", 0},
        {"iq2_xs", 2, kPoints, "2, 16, 4, 1, 8", 0},
        {"iq2_s", 2, kPoints, "2, 16, 4, 2, 16", 0},
        {"iq3_xxs", 3, kPoints, "3, 32, 4, 0, 0", 0},
        {"iq3_s", 3, kPoints, "3, 32, 4, 1, 12", 0}};
    for (const auto& [name, bits, kind, arguments, group] : kNamed) {
      list->push_back(
          {name, bits, c10::str(kind.type, "<MOE_DTYPE, ", arguments, ">"), kind.header, false, group});
    }
    for (const int64_t bits : {4, 1, 2, 3, 5, 6, 8}) {
      for (const int64_t group : {64, 32, 128}) {
        list->push_back({c10::str("affine", bits, "_", group), bits,
                         c10::str(kHalf.type, "<MOE_DTYPE, ", bits, ", TypedScales<MOE_DTYPE, ", group, ">>"),
                         kHalf.header, true, group});
      }
    }
    return list;
  }();
  return *formats;
}

Library quantized_library(const WeightFormat& format, c10::ScalarType dtype) {
  return {"quantized", dtype, format.name, format.type, format.header, format.norms_inputs()};
}

Library part_of(Library library, const char* file) {
  if (!library.weights.empty()) library.file = file;
  return library;
}

Library tensor_units_library(const Library& library) {
  if (!library.weights.empty())
    return {"tensor_units", library.dtype, library.weights, library.weights_type, library.weights_header};
  return {"tensor_units", library.dtype, "dense", "Dense<MOE_DTYPE>", "matmul/formats/dense"};
}

}  // namespace moe_mps
