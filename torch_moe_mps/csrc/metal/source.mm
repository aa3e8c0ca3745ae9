#include "source.h"

#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>

#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

namespace moe_mps {
namespace {

struct Directory {
  std::mutex mutex;
  std::string path;
};

Directory& directory = *new Directory;

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "moe_mps: shader source ", path, " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The name in `#include "name"`, or empty.
std::string_view local_include(std::string_view line) {
  constexpr std::string_view directive = "#include \"";
  if (line.substr(0, directive.size()) != directive) return {};
  line.remove_prefix(directive.size());
  return line.substr(0, line.find('"'));
}

// Local names are relative to the shader directory. The #line directives let the compiler's messages name the
// file they are about.
void flatten(const std::string& root, const std::string& name, std::set<std::string>& seen,
             std::string& out) {
  if (!seen.insert(name).second) return;
  std::istringstream text(read_file(root + "/" + name));
  out += "#line 1 \"" + name + "\"\n";
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    const std::string_view include = local_include(line);
    if (!include.empty()) {
      flatten(root, std::string(include), seen, out);
      out += "#line " + std::to_string(number + 1) + " \"" + name + "\"\n";
    } else if (line != "#pragma once") {
      out += line + "\n";
    } else {
      out += "\n";
    }
  }
}

std::string shader_directory() {
  const std::lock_guard<std::mutex> lock(directory.mutex);
  TORCH_CHECK(!directory.path.empty(), "moe_mps: the shader directory is not set");
  return directory.path;
}

}  // namespace

void set_shader_directory(std::string path) {
  const std::lock_guard<std::mutex> lock(directory.mutex);
  directory.path = std::move(path);
}

std::string compiled_file(const std::string& name) {
  const std::lock_guard<std::mutex> lock(directory.mutex);
  const std::string path = directory.path + "/compiled/" + name + ".metallib";
  return std::ifstream(path) ? path : "";
}

std::string flattened_source(const std::string& header, const std::string& file) {
  std::set<std::string> seen;
  std::string out;
  const std::string root = shader_directory();
  if (!header.empty()) flatten(root, header + ".h", seen, out);
  flatten(root, file + ".metal", seen, out);
  return out;
}

std::string grid_of(std::string_view format) {
  std::istringstream lines(read_file(shader_directory() + "/matmul/grids.txt"));
  std::ostringstream out;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string start, level, digits;
    uint32_t count = 0;
    std::vector<uint32_t> codes;
    fields >> start >> count >> level >> digits;
    if (start == "#" || format.substr(0, start.size()) != start) continue;
    const uint32_t bits = count == 2 ? 16 : level[0] == '-' ? 4 : 8, in_word = 32 / bits;
    for (std::istringstream levels(level); std::getline(levels, level, ',');) {
      const float value = std::stof(level) / (bits == 8 ? 65536.0f : 1.0f);
      const uint16_t half = c10::detail::fp16_ieee_from_fp32_value(value);
      codes.push_back(bits == 16 ? half : bits == 8 ? half >> 5 : codes.size());
    }
    std::vector<uint32_t> words;
    for (uint32_t point = 0; point < 4 * digits.size(); ++point) {
      if ((std::stoi(digits.substr(point / 4, 1), nullptr, 16) >> point % 4 & 1) == 0) continue;
      const size_t first = words.size();
      words.resize(first + count / in_word);
      for (uint32_t left = point, value = 0; value < count; ++value, left /= codes.size()) {
        const uint32_t place = value % 2 * 16 + value % in_word / 2 * bits;
        words[first + value / in_word] |= codes[left % codes.size()] << place;
      }
    }
    out << "#define MOE_GRID_WORDS " << words.size() << "\n#define MOE_GRID " << c10::Join("u,", words)
        << "u\n";
  }
  return out.str();
}

}  // namespace moe_mps
