#include "library.h"

#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <unordered_map>

namespace moe_mps {
namespace {

struct Cache {
  std::mutex mutex;
  std::string shader_directory;
  std::unordered_map<std::string, id<MTLLibrary>> libraries;
  std::unordered_map<std::string, id<MTLComputePipelineState>> pipelines;
};

Cache& cache() {
  static Cache* const instance = new Cache;  // never destroyed: Metal objects may outlive static destructors
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

// Metal compiles source text without a search path, so local headers are pasted, each one once. The #line
// directives let the compiler's messages name the file they are about.
void flatten(const std::string& directory, const std::string& name, std::set<std::string>& seen,
             std::string& out) {
  if (!seen.insert(name).second) return;
  std::istringstream text(read_file(directory + "/" + name));
  out += "#line 1 \"" + name + "\"\n";
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    const std::string_view include = local_include(line);
    if (!include.empty()) {
      flatten(directory, std::string(include), seen, out);
      out += "#line " + std::to_string(number + 1) + " \"" + name + "\"\n";
    } else if (line != "#pragma once") {
      out += line + "\n";
    } else {
      out += "\n";
    }
  }
}

const char* message(NSError* error) {
  return error == nil ? "no message" : [[error localizedDescription] UTF8String];
}

MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
  [options setLanguageVersion:MTLLanguageVersion3_1];
  // NaN and infinity are part of the operators' contract. This setter selects safe math on every macOS; its
  // successor, mathMode, exists from macOS 15 only.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
  [options setFastMathEnabled:NO];
#pragma clang diagnostic pop
  return options;
}

id<MTLLibrary> library(Cache& cache, id<MTLDevice> device, const std::string& name) {
  const auto found = cache.libraries.find(name);
  if (found != cache.libraries.end()) return found->second;
  TORCH_CHECK(!cache.shader_directory.empty(), "moe_mps: the shader directory is not set");
  std::set<std::string> seen;
  std::string source;
  flatten(cache.shader_directory, name + ".metal", seen, source);
  MTLCompileOptions* options = compile_options();
  NSError* error = nil;
  id<MTLLibrary> built = [device newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                              options:options
                                                error:&error];
  [options release];
  TORCH_CHECK(built != nil, "moe_mps: ", name, ".metal does not compile: ", message(error));
  cache.libraries.emplace(name, built);
  return built;
}

id<MTLComputePipelineState> build_pipeline(id<MTLDevice> device, id<MTLLibrary> library,
                                           const std::string& function) {
  id<MTLFunction> built = [library newFunctionWithName:[NSString stringWithUTF8String:function.c_str()]];
  TORCH_CHECK(built != nil, "moe_mps: no Metal function ", function);
  NSError* error = nil;
  id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:built error:&error];
  [built release];
  TORCH_CHECK(pipeline != nil, "moe_mps: no pipeline for ", function, ": ", message(error));
  return pipeline;
}

void set_shader_directory(std::string directory) {
  const std::lock_guard<std::mutex> lock(cache().mutex);
  cache().shader_directory = std::move(directory);
}

}  // namespace

id<MTLComputePipelineState> pipeline(id<MTLDevice> device, const std::string& library_name,
                                     const std::string& function) {
  const std::string key = library_name + "/" + function;
  const std::lock_guard<std::mutex> lock(cache().mutex);
  const auto found = cache().pipelines.find(key);
  if (found != cache().pipelines.end()) return found->second;
  id<MTLComputePipelineState> built = nil;
  @autoreleasepool {
    built = build_pipeline(device, library(cache(), device, library_name), function);
  }
  cache().pipelines.emplace(key, built);
  return built;
}

std::vector<std::string> functions_of(id<MTLDevice> device, const std::string& library_name) {
  std::vector<std::string> names;
  const std::lock_guard<std::mutex> lock(cache().mutex);
  @autoreleasepool {
    NSArray<NSString*>* functions = [library(cache(), device, library_name) functionNames];
    for (NSUInteger i = 0; i < [functions count]; ++i) {
      names.push_back([[functions objectAtIndex:i] UTF8String]);
    }
  }
  return names;
}

namespace {

// "<function> <most threads of a threadgroup> <bytes of threadgroup memory that it declares>" of each kernel:
// what a GPU and its compiler make of them, which scripts/check_metal prints.
std::vector<std::string> pipelines(const std::string& library_name) {
  id<MTLDevice> device = at::mps::getCurrentMPSStream()->device();
  std::vector<std::string> lines;
  for (const std::string& function : functions_of(device, library_name)) {
    id<MTLComputePipelineState> built = pipeline(device, library_name, function);
    lines.push_back(c10::str(function, " ", [built maxTotalThreadsPerThreadgroup], " ",
                             [built staticThreadgroupMemoryLength]));
  }
  return lines;
}

}  // namespace
}  // namespace moe_mps

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.def("_set_shader_directory(str directory) -> ()", &moe_mps::set_shader_directory);
  m.def("_pipelines(str library) -> str[]", &moe_mps::pipelines);
}
