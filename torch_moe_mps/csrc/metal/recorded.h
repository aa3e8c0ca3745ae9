// Which dispatches a call encodes, for the report of a wrong result.
#pragma once
#include <string>

namespace moe_mps {

// Whether this thread records what it encodes.
bool is_recording();
void record(std::string line);

}  // namespace moe_mps
