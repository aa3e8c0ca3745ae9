#include "recorded.h"

#include <torch/library.h>

#include <utility>
#include <vector>

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

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  // From here on, whether the dispatches of this thread are listed; none is yet.
  m.def("_record_dispatches(bool wanted) -> ()", &moe_mps::record_dispatches);
  m.def("_recorded_dispatches() -> str[]", &moe_mps::recorded_dispatches);
}
