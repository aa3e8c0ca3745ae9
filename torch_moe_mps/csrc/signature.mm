#include "signature.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "metal/function.h"

namespace moe_mps {
namespace {

// A process that sees more signatures than this (prompts of every length) forgets them and starts over: a
// check costs microseconds.
constexpr size_t kMaxSignatures = 8192;

// Signatures by their hash. Those with equal hashes are side by side; all their words are compared.
struct KnownSignatures {
  std::mutex mutex;
  std::unordered_multimap<uint64_t, std::vector<int64_t>> words;
  std::atomic<int64_t> begun = 1;
};

KnownSignatures& known = *new KnownSignatures;

uint64_t hash_of(c10::ArrayRef<int64_t> words) {
  uint64_t hash = words.size();
  for (const int64_t word : words) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

void Signature::append(const at::Tensor& tensor) {
  if (!tensor.defined()) return append(int64_t{-1});
  const c10::Device device = tensor.device();
  const bool is_contiguous = tensor.is_contiguous();
  const auto byte = [](auto value) { return static_cast<int64_t>(static_cast<uint8_t>(value)); };
  append(byte(tensor.scalar_type()) | byte(device.type()) << 8 | byte(device.index()) << 16 |
         byte(is_contiguous) << 24 | tensor.dim() << 32);
  append(tensor.sizes());
  if (!is_contiguous) append(tensor.strides());
}

void Signature::append(std::string_view text) {
  append(static_cast<int64_t>(text.size()));
  for (size_t start = 0; start < text.size(); start += sizeof(int64_t)) {
    int64_t word = 0;
    std::memcpy(&word, text.data() + start, std::min(sizeof(word), text.size() - start));
    append(word);
  }
}

int64_t checks_begun() {
  return known.begun;
}

bool signature_is_known(const Signature& signature) {
  const uint64_t hash = hash_of(signature.words());
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto [first, last] = known.words.equal_range(hash);
  return std::any_of(first, last, [&](const auto& entry) { return signature.words() == entry.second; });
}

void check_with_meta_kernel(const char* operator_name, std::vector<c10::IValue> arguments) {
  const std::string qualified = std::string(C10_STRINGIZE(moe_mps) "::") + operator_name;
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "");
  // A library for the Hub has no meta kernels: its Python checks arguments before a call.
  if (!handle.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return;
  handle.callBoxedForDispatchKey(c10::DispatchKey::Meta, arguments);
}

void remember_signature(const Signature& signature) {
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (known.words.size() >= kMaxSignatures) known.words.clear();
  known.words.emplace(hash_of(signature.words()), signature.words().vec());
}

namespace {

void forget_signatures() {
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.words.clear();
  ++known.begun;
}

}  // namespace
}  // namespace moe_mps

MOE_FUNCTION("_forget_signatures() -> ()", forget_signatures)
