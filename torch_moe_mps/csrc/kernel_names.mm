#include "kernel_names.h"

#include <c10/util/Exception.h>

namespace moe_mps {

const char* dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "f32";
    case c10::ScalarType::Half:
      return "f16";
    case c10::ScalarType::BFloat16:
      return "bf16";
    case c10::ScalarType::Int:
      return "i32";
    case c10::ScalarType::Long:
      return "i64";
    case c10::ScalarType::Byte:
      return "u8";
    default:
      TORCH_CHECK(false, "moe_mps: no kernel for dtype ", dtype);
  }
}

std::string kernel_name(const char* base, std::initializer_list<NamePart> parts) {
  std::string name = base;
  for (const NamePart& part : parts) name += "_" + part.text();
  return name;
}

}  // namespace moe_mps
