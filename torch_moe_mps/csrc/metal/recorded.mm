#include "recorded.h"

#include <utility>
#include <vector>

#include "function.h"

namespace moe_mps {
namespace {

struct Recorded {
  bool wanted = false;
  std::vector<std::string> lines;
};

Recorded& recorded() {
  static thread_local Recorded instance;
  return instance;
}

void record_dispatches(bool wanted) {
  recorded() = {wanted, {}};
}

std::vector<std::string> recorded_dispatches() {
  return recorded().lines;
}

}  // namespace

bool is_recording() {
  return recorded().wanted;
}

void record(std::string line) {
  recorded().lines.push_back(std::move(line));
}

}  // namespace moe_mps

// From here on, whether the dispatches of this thread are listed; none is yet.
MOE_FUNCTION("_record_dispatches(bool wanted) -> ()", record_dispatches)
MOE_FUNCTION("_recorded_dispatches() -> str[]", recorded_dispatches)
