#include "source.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>

namespace moe_mps {
namespace {

struct Directory {
  std::mutex mutex;
  std::string path;
};

Directory& directory() {
  static auto* const instance = new Directory;
  return *instance;
}

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

}  // namespace

void set_shader_directory(std::string path) {
  const std::lock_guard<std::mutex> lock(directory().mutex);
  directory().path = std::move(path);
}

std::string flattened_source(const std::string& file) {
  std::string root;
  {
    const std::lock_guard<std::mutex> lock(directory().mutex);
    root = directory().path;
  }
  TORCH_CHECK(!root.empty(), "moe_mps: the shader directory is not set");
  std::set<std::string> seen;
  std::string out;
  flatten(root, file + ".metal", seen, out);
  return out;
}

}  // namespace moe_mps
