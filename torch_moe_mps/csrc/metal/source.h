// The text of the shaders, which is package data: a change of a .metal file needs no rebuild.
#pragma once
#include <string>

namespace moe_mps {

void set_shader_directory(std::string directory);

// shaders/<file>.metal with its local headers pasted in, each one once: Metal compiles source text without a
// search path.
std::string flattened_source(const std::string& file);

}  // namespace moe_mps
