// The text of the shaders, which is package data: a change of a .metal file needs no rebuild.
#pragma once
#include <string>
#include <string_view>

namespace moe_mps {

void set_shader_directory(std::string directory);

// The file <directory>/compiled/<name>.metallib; empty where there is none, or none is to be taken.
std::string compiled_file(const std::string& name);

// shaders/<header>.h, if there is one, and shaders/<file>.metal with their local headers pasted in, each one
// once: Metal compiles source text without a search path.
std::string flattened_source(const std::string& header, const std::string& file);

// The definitions of MOE_GRID, the points of a format's grid from shaders/matmul/grids.txt as the shader
// reads them, and of MOE_GRID_WORDS, how many words they are. Empty for a format without one.
std::string grid_of(std::string_view format);

}  // namespace moe_mps
