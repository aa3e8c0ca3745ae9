// Names of Metal functions are put together here and nowhere else: <base>_<part>_<part>, a dtype being f32,
// f16, bf16, i32, i64, u8.
#pragma once
#include <c10/core/ScalarType.h>

#include <initializer_list>
#include <string>

namespace moe_mps {

const char* dtype_name(c10::ScalarType dtype);

class NamePart {
 public:
  NamePart(c10::ScalarType dtype) : text_(dtype_name(dtype)) {}
  NamePart(const char* text) : text_(text) {}
  NamePart(int64_t number) : text_(std::to_string(number)) {}
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string kernel_name(const char* base, std::initializer_list<NamePart> parts);

}  // namespace moe_mps
