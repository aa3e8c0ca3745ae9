#include "tuned.h"

#include <ATen/core/Dict.h>
#include <c10/util/hash.h>
#include <c10/util/StringUtil.h>

#include <atomic>
#include <bit>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "../shaders/geometry.h"
#include "metal/function.h"

namespace moe_mps {
namespace {

struct Table {
  std::atomic<bool> empty = true;
  std::mutex mutex;
  std::unordered_map<std::string, int64_t> simdgroups;  // by name
  std::unordered_map<size_t, int64_t> found;            // the same by hash; 0: there is none
};

Table& table = *new Table;

using Listed = c10::Dict<std::string, std::vector<int64_t>>;

struct Listing {
  bool wanted = false;
  Listed steps;
};

thread_local Listing listing;

// "<kernel> <experts>x<rows>x<inputs> by <pairs, up to a power of two>"
std::string name_of(const MatmulStep& step, const MatrixStack& matrix, int64_t pairs) {
  return c10::str(step.kernel, matrix.library.suffix(), " ", matrix.experts, "x", matrix.rows, "x",
                  matrix.inputs, " by ", std::bit_ceil(static_cast<uint64_t>(pairs)));
}

// Hash of the name, without making one: every launch of a token asks. Any number that comes of equal
// hashes would give the same bits.
size_t hash_of(const MatmulStep& step, const MatrixStack& matrix, int64_t pairs) {
  return c10::get_hash(step.kernel, matrix.library.weights, static_cast<int>(matrix.library.dtype),
                       matrix.experts, matrix.rows, matrix.inputs,
                       std::bit_ceil(static_cast<uint64_t>(pairs)));
}

// Threadgroups that the pipeline allows, too.
std::vector<int64_t> offered(const MatmulStep& step, const Library& library) {
  std::vector<int64_t> numbers = simdgroups_of(step);
  const auto most = static_cast<int64_t>(pipeline(library, step.kernel).most_threads) / kSimdWidth;
  std::erase_if(numbers, [&](int64_t number) { return number > most; });
  return numbers;
}

void tune(const std::string& name, int64_t simdgroups) {
  const std::lock_guard<std::mutex> lock(table.mutex);
  if (simdgroups == 0) {
    table.simdgroups.erase(name);
  } else {
    table.simdgroups[name] = simdgroups;
  }
  table.empty = table.simdgroups.empty();
  table.found.clear();
}

void list_tunable(bool wanted) {
  listing.wanted = wanted;
  listing.steps = Listed();
}

Listed listed_tunable() {
  return listing.steps;
}

}  // namespace

MatmulStep tuned(MatmulStep step, const MatrixStack& matrix, int64_t pairs) {
  // For matrix products no other number gives the same bits.
  const bool is_product = step.kernels == KernelsOf::kPrompts || step.kernels == KernelsOf::kTensorUnits;
  if (is_product || (table.empty && !listing.wanted)) return step;
  if (listing.wanted) {
    listing.steps.insert_or_assign(name_of(step, matrix, pairs), offered(step, library_of(step, matrix)));
  }
  const std::lock_guard<std::mutex> lock(table.mutex);
  const auto [known, is_new] = table.found.try_emplace(hash_of(step, matrix, pairs), 0);
  if (is_new) {
    const auto named = table.simdgroups.find(name_of(step, matrix, pairs));
    if (named != table.simdgroups.end()) known->second = named->second;
  }
  if (known->second == 0) return step;
  return with_simdgroups(std::move(step), known->second);
}

}  // namespace moe_mps

// Lets what `_listed_tunable` names run with so many simdgroups a threadgroup; 0: as planned.
MOE_FUNCTION("_tune(str name, int simdgroups) -> ()", tune)
// From here on, whether what this thread encodes is listed; nothing is yet.
MOE_FUNCTION("_list_tunable(bool wanted) -> ()", list_tunable)
// {name: the numbers of simdgroups that give the same bits, the planned one first}
MOE_FUNCTION("_listed_tunable() -> Dict(str, int[])", listed_tunable)
