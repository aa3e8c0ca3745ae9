// Argument checks live in Python, one per operator (ops/*.py). A call whose shapes, dtypes, devices and
// scalars have not been seen yet goes through the operator's Meta kernel, which runs the check and raises its
// one-line error; then the signature is remembered, so that the hot path never enters Python.
#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe_mps {

class Signature {
 public:
  explicit Signature(const char* operator_name) : key_(operator_name) {}

  void append(const at::Tensor& tensor);
  void append(std::string_view text);
  void append(double value) { append_bytes(&value, sizeof(value)); }
  void append(c10::ScalarType value) { append(static_cast<int64_t>(value)); }
  void append(int64_t value) { append_bytes(&value, sizeof(value)); }
  void append(bool value) { key_ += value ? '1' : '0'; }
  template <class T>
  void append(const std::optional<T>& value) {
    append(value.has_value());
    if (value.has_value()) append(*value);
  }

  const std::string& key() const { return key_; }

 private:
  void append_bytes(const void* data, size_t size) { key_.append(static_cast<const char*>(data), size); }

  std::string key_;
};

bool signature_is_known(const Signature& signature);
void check_with_meta_kernel(const char* operator_name, std::vector<c10::IValue> arguments);
void remember_signature(const Signature& signature);

inline c10::IValue to_ivalue(std::string_view text) {
  return std::string(text);
}
template <class T>
c10::IValue to_ivalue(const T& value) {
  return c10::IValue(value);
}

// `arguments` are the operator's, all of them, in the order of its schema.
template <class... Arguments>
void check_call(const char* operator_name, const Arguments&... arguments) {
  Signature signature(operator_name);
  (signature.append(arguments), ...);
  if (signature_is_known(signature)) return;
  check_with_meta_kernel(operator_name, {to_ivalue(arguments)...});
  remember_signature(signature);
}

}  // namespace moe_mps
