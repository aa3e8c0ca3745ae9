#include "signature.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <unordered_set>

namespace moe_mps {
namespace {

// A process that meets more signatures than this (prompts of every length) starts over: a check costs
// microseconds.
constexpr size_t kMaxSignatures = 8192;

struct Seen {
  std::mutex mutex;
  std::unordered_set<std::string> keys;
};

Seen& seen() {
  static Seen* const instance = new Seen;
  return *instance;
}

}  // namespace

void Signature::append(const at::Tensor& tensor) {
  append(tensor.defined());
  if (!tensor.defined()) return;
  const c10::Device device = tensor.device();
  const char header[] = {static_cast<char>(tensor.scalar_type()), static_cast<char>(device.type()),
                         static_cast<char>(device.index()), static_cast<char>(tensor.dim())};
  append_bytes(header, sizeof(header));
  append_bytes(tensor.sizes().data(), tensor.dim() * sizeof(int64_t));
  append(tensor.is_contiguous());
  if (!tensor.is_contiguous()) append_bytes(tensor.strides().data(), tensor.dim() * sizeof(int64_t));
}

void Signature::append(std::string_view text) {
  append(static_cast<int64_t>(text.size()));
  key_ += text;
}

bool signature_is_known(const Signature& signature) {
  const std::lock_guard<std::mutex> lock(seen().mutex);
  return seen().keys.count(signature.key()) > 0;
}

void check_with_meta_kernel(const char* operator_name, std::vector<c10::IValue> arguments) {
  const std::string qualified = std::string("moe_mps::") + operator_name;
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "");
  handle.callBoxedForDispatchKey(c10::DispatchKey::Meta, arguments);
}

void remember_signature(const Signature& signature) {
  const std::lock_guard<std::mutex> lock(seen().mutex);
  if (seen().keys.size() >= kMaxSignatures) seen().keys.clear();
  seen().keys.insert(signature.key());
}

}  // namespace moe_mps
