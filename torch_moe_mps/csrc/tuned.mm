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
  std::atomic<bool> takes_variants = false;           // wherever there is one
  std::unordered_map<std::string, int64_t> launches;  // numbers by name
  std::unordered_map<size_t, int64_t> found;          // the same by hash; 0: there is none
};

Table& table = *new Table;

using Listed = c10::Dict<std::string, std::vector<int64_t>>;

struct Listing {
  bool wanted = false;
  Listed steps;
};

thread_local Listing listing;

bool is_product(const MatmulStep& step) {
  return step.kernels == KernelsOf::kPrompts || step.kernels == KernelsOf::kTensorUnits;
}

// Pairs up to a power of two; of a product 0, for any number.
uint64_t counted(const MatmulStep& step, int64_t pairs) {
  return is_product(step) ? 0 : std::bit_ceil(static_cast<uint64_t>(pairs));
}

bool is_quantised(const MatrixStack& matrix) {
  return !matrix.library.weights.empty();
}

// "<kernel> <experts>x<rows>x<inputs> by <pairs>", without pairs of a product
std::string name_of(const MatmulStep& step, const MatrixStack& matrix, int64_t pairs) {
  const std::string name = c10::str(step.kernel, matrix.library.suffix(), " ", matrix.experts, "x",
                                    matrix.rows, "x", matrix.inputs);
  return is_product(step) ? name : c10::str(name, " by ", counted(step, pairs));
}

// Hash of the name, without making one: every launch of a token asks. Any number that comes of equal
// hashes would give the same bits.
size_t hash_of(const MatmulStep& step, const MatrixStack& matrix, int64_t pairs) {
  return c10::get_hash(step.kernel, matrix.library.weights, static_cast<int>(matrix.library.dtype),
                       matrix.experts, matrix.rows, matrix.inputs, counted(step, pairs));
}

// Whether the pipeline allows so many threads. A variant that does not compile is not there: nothing needs
// it.
bool is_allowed(const MatmulStep& step, const MatrixStack& matrix) {
  try {
    return step.threads <= static_cast<int64_t>(pipeline(library_of(step, matrix), step.kernel).most_threads);
  } catch (const c10::Error&) {
    if (step.kernels == KernelsOf::kVariants) return false;
    throw;
  }
}

std::vector<int64_t> offered(const MatmulStep& step, const MatrixStack& matrix) {
  std::vector<int64_t> numbers = launches_of(step, is_quantised(matrix));
  std::erase_if(numbers, [&](int64_t number) {
    return !is_allowed(with_launch(step, number, is_quantised(matrix)), matrix);
  });
  return numbers;
}

void tune(const std::string& name, int64_t number) {
  const std::lock_guard<std::mutex> lock(table.mutex);
  if (number == 0) {
    table.launches.erase(name);
  } else {
    table.launches[name] = number;
  }
  table.empty = table.launches.empty();
  table.found.clear();
}

void take_variants(bool wanted) {
  table.takes_variants = wanted;
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
  if (table.takes_variants) {
    const int64_t last = launches_of(step, is_quantised(matrix)).back();
    return last > kVariant ? with_launch(std::move(step), last, true) : step;
  }
  if (table.empty && !listing.wanted) return step;
  if (listing.wanted) listing.steps.insert_or_assign(name_of(step, matrix, pairs), offered(step, matrix));
  const std::lock_guard<std::mutex> lock(table.mutex);
  const auto [known, is_new] = table.found.try_emplace(hash_of(step, matrix, pairs), 0);
  if (is_new) {
    const auto named = table.launches.find(name_of(step, matrix, pairs));
    if (named != table.launches.end()) known->second = named->second;
  }
  if (known->second == 0) return step;
  return with_launch(std::move(step), known->second, is_quantised(matrix));
}

}  // namespace moe_mps

// Lets what `_listed_tunable` names run by the launch of a number; 0: as planned.
MOE_FUNCTION("_tune(str name, int number) -> ()", tune)
// Lets every matmul that has a variant run it, whatever is tuned.
MOE_FUNCTION("_take_variants(bool wanted) -> ()", take_variants)
// From here on, whether what this thread encodes is listed; nothing is yet.
MOE_FUNCTION("_list_tunable(bool wanted) -> ()", list_tunable)
// {name: the numbers of the launches that give the same bits, the planned one first}
MOE_FUNCTION("_listed_tunable() -> Dict(str, int[])", listed_tunable)
