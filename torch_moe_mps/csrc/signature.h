// Argument checks live in Python, one per operator (ops/*.py). A call whose shapes, dtypes, devices and
// scalars have not been seen yet goes through the operator's Meta kernel, which runs the check and raises its
// one-line error; then the signature is remembered, so that the hot path never enters Python.
#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moe_mps {

// The words that tell all calls apart. It lives on the stack: a known call allocates nothing.
class Signature {
 public:
  // The address of a name stands for the operator.
  explicit Signature(const char* operator_name) { append(reinterpret_cast<int64_t>(operator_name)); }

  void append(const at::Tensor& tensor);
  void append(std::string_view text);
  void append(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    append(bits);
  }
  void append(c10::ScalarType value) { append(static_cast<int64_t>(value)); }
  void append(int64_t value) { words_.push_back(value); }
  void append(bool value) { append(static_cast<int64_t>(value)); }
  template <class T>
  void append(const std::optional<T>& value) {
    append(value.has_value());
    if (value.has_value()) append(*value);
  }

  c10::ArrayRef<int64_t> words() const { return words_; }

 private:
  void append(at::IntArrayRef numbers) { words_.append(numbers.begin(), numbers.end()); }

  c10::SmallVector<int64_t, 128> words_;
};

// While it lives, calls of this thread are not checked: those of a captured token are the same in every run
// but for sizes that grow with the context, for all of which the recording has checked them.
class WithoutChecks {
 public:
  explicit WithoutChecks(bool wanted) : before_(std::exchange(active, wanted)) {}
  ~WithoutChecks() { active = before_; }
  WithoutChecks(const WithoutChecks&) = delete;

  static inline thread_local bool active = false;

 private:
  bool before_;
};

// Changes when all signatures are forgotten: from then on, calls have to be checked again.
int64_t checks_begun();

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
  if (WithoutChecks::active) return;
  Signature signature(operator_name);
  (signature.append(arguments), ...);
  if (signature_is_known(signature)) return;
  check_with_meta_kernel(operator_name, {to_ivalue(arguments)...});
  remember_signature(signature);
}

}  // namespace moe_mps
