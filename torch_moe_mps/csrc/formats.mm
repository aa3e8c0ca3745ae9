#include "formats.h"

#include <c10/util/Exception.h>

#include <utility>

#include "metal/function.h"

namespace moe_mps {
namespace {

// Libraries keep views of the names: a deque never moves them.
std::deque<WeightFormat>& formats = *new std::deque<WeightFormat>;

// Called when the package loads this library, before any operator runs; a format is added once.
void add_format(std::string name, std::string type, std::string header, int64_t bits, int64_t group_size,
                bool scales_like_activations) {
  for (const WeightFormat& format : formats) {
    if (format.name == name) return;
  }
  formats.push_back({std::move(name), bits, group_size, std::move(type), "matmul/formats/" + header,
                     scales_like_activations});
}

}  // namespace

const WeightFormat& weight_format(std::string_view name) {
  for (const WeightFormat& format : formats) {
    if (format.name == name) return format;
  }
  TORCH_CHECK(false, "moe_mps: no kernel for weights of format ", name);
}

const std::deque<WeightFormat>& all_formats() {
  return formats;
}

Library quantized_library(const WeightFormat& format, c10::ScalarType dtype) {
  return {"quantized", dtype, format.name, format.type, format.header.c_str(), format.norms_inputs()};
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

MOE_FUNCTION("_add_format(str name, str type, str header, int bits, int group_size, bool "
             "scales_like_activations) -> ()",
             add_format)
