#include "library.h"

#include <ATen/mps/MPSStream.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include <deque>
#include <exception>
#include <future>
#include <iomanip>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "../attention_plan.h"
#include "../formats.h"
#include "../routing.h"
#include "../tensor_units.h"
#include "function.h"
#include "source.h"

// Declared here: SDKs before macOS 15, one of which may have built this, have no such setters.
@protocol MoeMathOptions <NSObject>
- (void)setMathMode:(NSInteger)mode;
- (void)setMathFloatingPointFunctions:(NSInteger)functions;
@end

namespace moe_mps {
namespace {

// A cache that makes each value once. make() runs without the lock; other callers of the same key wait for
// it. If it fails, all of them get the error, and the next call tries again. Of more values than `most` the
// oldest is dropped, and made again where it is asked for.
template <class Value>
class Once {
 public:
  std::atomic<size_t> most = std::numeric_limits<size_t>::max();

  template <class Make>
  std::shared_future<Value> get(std::string_view key, const Make& make) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = futures_.find(key);
    if (found != futures_.end()) {
      std::shared_future<Value> future = found->second;
      lock.unlock();
      future.wait();
      return future;
    }
    std::promise<Value> promise;
    const std::shared_future<Value> future = promise.get_future().share();
    const std::string name(key);
    futures_.emplace(name, future);
    lock.unlock();
    try {
      promise.set_value(make(name));
    } catch (...) {
      promise.set_exception(std::current_exception());
      lock.lock();
      futures_.erase(name);
      throw;
    }
    lock.lock();
    made_.push_back(name);
    while (made_.size() > most) {
      futures_.erase(made_.front());
      made_.pop_front();
    }
    return future;
  }
  bool has(std::string_view key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return futures_.count(key) > 0;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_future<Value>, std::less<>> futures_;
  std::deque<std::string> made_;  // without those that are being made
};

// A library that is released with its last owner. Pipelines do not need it any more.
struct Built {
  explicit Built(id<MTLLibrary> made) : library(made) {}
  Built(const Built&) = delete;
  ~Built() { [library release]; }
  const id<MTLLibrary> library;
};

// Never destroyed: Metal objects may outlive static destructors.
Once<std::shared_ptr<Built>>& libraries = *new Once<std::shared_ptr<Built>>;
Once<Pipeline>& pipelines = *new Once<Pipeline>;

// Names of a dtype in the names of kernels, and in Metal.
struct DtypeNames {
  const char *suffix, *type;
};
DtypeNames names_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float: return {"f32", "float"};
    case c10::ScalarType::Half: return {"f16", "half"};
    case c10::ScalarType::BFloat16: return {"bf16", "bfloat"};
    case c10::ScalarType::Int: return {"i32", "int"};
    case c10::ScalarType::Long: return {"i64", "long"};
    default: TORCH_CHECK(false, "moe_mps: no kernel for dtype ", dtype);
  }
}

template <class Text>
void append_suffix(Text& text, const Library& library) {
  const auto append = [&](std::string_view part) { text.append(part.begin(), part.end()); };
  append("_");
  append(library.weights);
  if (!library.weights.empty()) append("_");
  append(names_of(library.dtype).suffix);
}

std::string source_of(const Library& library) {
  std::string text = c10::str("#define MOE_DTYPE ", names_of(library.dtype).type, "\n#define MOE_SUFFIX \"",
                              library.suffix(), "\"\n");
  if (!library.weights.empty()) text += c10::str("#define MOE_WEIGHTS ", library.weights_type, "\n");
  if (library.width > 0) text += c10::str("#define MOE_WIDTH ", library.width, "\n");
  if (!library.norms_inputs) {
    text += "#define MOE_NORMS_APART\n";
  } else if (library.dtype != c10::ScalarType::Float) {
    text += "#define MOE_WIDE_NORMS\n";  // also by weights in float32
  }
  return text + grid_of(library.weights) + flattened_source(library.weights_header, library.file);
}

const char* message(NSError* error) {
  return error == nil ? "no message" : [[error localizedDescription] UTF8String];
}

constexpr NSInteger kMathModeSafe = 0, kFunctionsPrecise = 1;

MTLCompileOptions* compile_options(bool has_tensors) {
  // 4.0 by number: it is the running macOS that has to know it, not the SDK of the build.
  constexpr auto kVersion4_0 = static_cast<MTLLanguageVersion>(4 << 16);
  MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
  // Not a later one: from 4.1 on the implicit `this` of a member function is in no address space of its own.
  [options setLanguageVersion:has_tensors ? kVersion4_0 : MTLLanguageVersion3_1];
  // NaN and infinity are part of the operators' contract. From macOS 15 on, functions such as exp are a
  // choice of their own, and fast by default; before, one setter chooses both.
  if ([options respondsToSelector:@selector(setMathFloatingPointFunctions:)]) {
    const id<MoeMathOptions> math = static_cast<id>(options);
    [math setMathMode:kMathModeSafe];
    [math setMathFloatingPointFunctions:kFunctionsPrecise];
    return options;
  }
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
  [options setFastMathEnabled:NO];
#pragma clang diagnostic pop
  return options;
}

// "<name>-<key>": the key is FNV-1a, in 64 bits, of the source, in which a release's file was compiled.
std::string compiled_name(const Library& library, const std::string& source) {
  uint64_t key = 14695981039346656037u;
  for (const unsigned char byte : source) key = (key ^ byte) * 1099511628211u;
  std::ostringstream name;
  name << library.name() << "-" << std::hex << std::setw(16) << std::setfill('0') << key;
  return name.str();
}

// The library that a release has compiled of this very source; nil if there is none, or Metal refuses it, as
// an older macOS may.
id<MTLLibrary> compiled_library(id<MTLDevice> device, const Library& library, const std::string& source) {
  const std::string file = compiled_file(compiled_name(library, source));
  if (file.empty()) return nil;
  return [device newLibraryWithURL:[NSURL fileURLWithPath:[NSString stringWithUTF8String:file.c_str()]]
                             error:nil];
}

id<MTLLibrary> build_library(id<MTLDevice> device, const Library& library) {
  TORCH_CHECK(!library.has_tensors() || has_tensors(device), "moe_mps: ", library.name(), " needs ",
              kTensorUnitsNeed, "; without MOE_MPS_TENSOR_UNITS=1 it is not used");
  const std::string source = source_of(library);
  @autoreleasepool {
    if (id<MTLLibrary> compiled = compiled_library(device, library, source)) return compiled;
    MTLCompileOptions* options = compile_options(library.has_tensors());
    [device setShouldMaximizeConcurrentCompilation:YES];  // several libraries are built side by side
    NSError* error = nil;
    id<MTLLibrary> built = [device newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                options:options
                                                  error:&error];
    [options release];
    TORCH_CHECK(built != nil, "moe_mps: ", library.name(), " does not compile",
                library.has_tensors() ? c10::str(", which takes ", kTensorUnitsNeed) : "", ": ",
                message(error));
    return built;
  }
}

std::shared_ptr<Built> library_of(id<MTLDevice> device, const Library& library) {
  const auto build = [&](const auto&) { return std::make_shared<Built>(build_library(device, library)); };
  return libraries.get(library.name(), build).get();
}

void set_shaders(std::string directory, int64_t most_libraries) {
  libraries.most = static_cast<size_t>(most_libraries);
  set_shader_directory(std::move(directory));
}

Pipeline build_pipeline(const Library& library, const std::string& name) {
  id<MTLDevice> device = at::mps::getCurrentMPSStream()->device();
  const std::shared_ptr<Built> built = library_of(device, library);
  @autoreleasepool {
    id<MTLLibrary> source = built->library;
    id<MTLFunction> function = [source newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]];
    // An empty library is a fault of the compiler, which said nothing (ice_halo_sim#139).
    TORCH_CHECK(function != nil, "moe_mps: no Metal function ", name, ": its library ", library.name(),
                " has ", [[source functionNames] count], " functions");
    NSError* error = nil;
    id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
    [function release];
    TORCH_CHECK(state != nil, "moe_mps: no pipeline for ", name, ": ", message(error));
    return {name,
            state,
            [state maxTotalThreadsPerThreadgroup],
            [state staticThreadgroupMemoryLength],
            [device maxThreadgroupMemoryLength],
            new std::atomic<NSUInteger>(0)};
  }
}

}  // namespace

std::string Library::suffix() const {
  std::string text;
  append_suffix(text, *this);
  return text;
}

std::string Library::name() const {
  return width > 0 ? c10::str(file, "_", width, suffix()) : file + suffix();
}

const Pipeline& pipeline(const Library& library, std::string_view function) {
  c10::SmallVector<char, 96> name(function.begin(), function.end());  // found without an allocation
  append_suffix(name, library);
  const auto build = [&](const std::string& kept) { return build_pipeline(library, kept); };
  return pipelines.get({name.data(), name.size()}, build).get();  // the cache keeps it
}

const Library& probe_library() {
  static const Library library = {"probe", at::kFloat};
  return library;
}

const std::vector<Library>& all_libraries() {
  static const auto* const all = [] {
    auto* list = new std::vector<Library>{{"bucket", at::kInt}, {"bucket", at::kLong}};
    for (const c10::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const char* file :
           {"norms", "norms_residual", "norms_gated", "norms_layer", "rope", "rope_centred", "routing_logits",
            "attention_merge", "write_cache", "tiles_seal"})
        list->push_back({file, dtype});
      for (const char* file :
           {"index", "pooling", "causal_conv1d", "gated_delta_rule", "selective_scan", "lora",
            "hyper_connection", "combine", "pointwise", "sampling", "quantize", "experts"})
        list->push_back({file, dtype});
      for (const Library& library : routing_libraries(dtype)) list->push_back(library);
      for (const Library& library : attention_libraries(dtype)) list->push_back(library);
      for (const WeightFormat& format : all_formats()) {
        const Library library = quantized_library(format, dtype);
        for (const char* file : {library.file, kJoined, kOfFew, kOfPrompts, kOfHeads, kVariants})
          list->push_back(part_of(library, file));
      }
    }
    for (const c10::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      list->push_back(tensor_units_library({"experts", dtype}));
      for (const WeightFormat& format : all_formats())
        list->push_back(tensor_units_library(quantized_library(format, dtype)));
    }
    return list;
  }();
  return *all;
}

namespace {

const Library& named_library(const std::string& name) {
  for (const Library& library : all_libraries()) {
    if (library.name() == name) return library;
  }
  if (name == probe_library().name()) return probe_library();
  TORCH_CHECK(false, "moe_mps: no library ", name);
}

// Libraries for every GPU, or those for GPUs with tensor units.
std::vector<std::string> library_names(bool has_tensors) {
  std::vector<std::string> names;
  for (const Library& library : all_libraries()) {
    if (library.has_tensors() == has_tensors) names.push_back(library.name());
  }
  return names;
}

std::string library_source(const std::string& name) {
  return source_of(named_library(name));
}

std::string library_file(const std::string& name) {
  return compiled_name(named_library(name), library_source(name)) + ".metallib";
}

bool is_built(const std::string& name) {
  return libraries.has(named_library(name).name());
}

// "<function> <most threads of a threadgroup> <the most that a plan asked for so far> <bytes of threadgroup
// memory that it declares>" of each kernel.
std::vector<std::string> library_pipelines(const std::string& name) {
  const Library& library = named_library(name);
  id<MTLDevice> device = at::mps::getCurrentMPSStream()->device();
  std::vector<std::string> functions, lines;
  const std::shared_ptr<Built> source = library_of(device, library);
  @autoreleasepool {
    NSArray<NSString*>* listed = [source->library functionNames];
    for (NSUInteger i = 0; i < [listed count]; ++i)
      functions.push_back([[listed objectAtIndex:i] UTF8String]);
  }
  for (const std::string& function : functions) {
    const std::string base = function.substr(0, function.size() - library.suffix().size());
    const Pipeline& built = pipeline(library, base);
    lines.push_back(
        c10::str(function, " ", built.most_threads, " ", built.launched->load(), " ", built.static_bytes));
  }
  return lines;
}

std::string gpu_name() {
  @autoreleasepool {
    return [[at::mps::getCurrentMPSStream()->device() name] UTF8String];
  }
}

}  // namespace
}  // namespace moe_mps

// 128 hold what two or more models run: in 4 bits, the tests' architectures compile 12 to 23 libraries,
// Hunyuan V4 with its vision tower 51, and each further format of weights adds 4 or 5. A whole `check`
// compiles over 800.
MOE_FUNCTION("_set_shader_directory(str directory, int most_libraries=128) -> ()", set_shaders)
MOE_FUNCTION("_libraries(bool tensor_units=False) -> str[]", library_names)
MOE_FUNCTION("_library_source(str library) -> str", library_source)
MOE_FUNCTION("_library_file(str library) -> str", library_file)
MOE_FUNCTION("_is_built(str library) -> bool", is_built)
MOE_FUNCTION("_gpu_name() -> str", gpu_name)
MOE_FUNCTION("_pipelines(str library) -> str[]", library_pipelines)
