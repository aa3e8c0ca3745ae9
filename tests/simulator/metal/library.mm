// MTLCompileOptions, MTLLibrary, MTLFunction, MTLComputePipelineState: from MSL source to a kernel that can
// be run.
#include <dlfcn.h>
#import <Metal/Metal.h>

#include <fstream>
#include <sstream>

#include "foundation.h"
#include "metal.h"
#include "runtime.h"

namespace {

void set_error(NSError** error, const std::string& message) {
  if (error) *error = simulated_error(message);
}

struct Kernels {
  const msl_kernel* first = nullptr;
  int count = 0;
};

// Loaded libraries stay: recorded commands and pipelines point into them.
Kernels load(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) simulator::fail(std::string("the translated shader does not load: ") + dlerror());
  auto kernels = reinterpret_cast<msl_kernels_fn>(dlsym(handle, "msl_kernels"));
  if (!kernels) simulator::fail("the translated shader " + path + " exports no msl_kernels");
  Kernels loaded;
  loaded.first = kernels(&loaded.count);
  return loaded;
}

const msl_kernel* find(const Kernels& kernels, const std::string& name) {
  for (int i = 0; i < kernels.count; i++) {
    if (name == kernels.first[i].name) return &kernels.first[i];
  }
  return nullptr;
}

}  // namespace

@implementation MTLCompileOptions
- (instancetype)init {
  _version = MTLLanguageVersion3_2;
  _mathMode = MTLMathModeFast;
  _functions = MTLMathFloatingPointFunctionsFast;
  return self;
}
- (BOOL)respondsToSelector:(SEL)selector {
  const bool is_new = sel_isEqual(selector, @selector(setMathMode:)) ||
                      sel_isEqual(selector, @selector(setMathFloatingPointFunctions:));
  return is_new && simulator::macos() < 15 ? NO : [super respondsToSelector:selector];
}
- (MTLMathFloatingPointFunctions)mathFloatingPointFunctions {
  return _functions;
}
- (void)setMathFloatingPointFunctions:(MTLMathFloatingPointFunctions)functions {
  _functions = functions;
}
- (MTLLanguageVersion)languageVersion {
  return _version;
}
- (void)setLanguageVersion:(MTLLanguageVersion)version {
  _version = version;
}
- (MTLMathMode)mathMode {
  return _mathMode;
}
- (void)setMathMode:(MTLMathMode)mode {
  _mathMode = mode;
}
- (BOOL)fastMathEnabled {
  return _mathMode == MTLMathModeFast;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  _mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
  if (simulator::macos() >= 15) return;  // the functions are a choice of their own there
  _functions = enabled ? MTLMathFloatingPointFunctionsFast : MTLMathFloatingPointFunctionsPrecise;
}
@end

@interface SimulatorFunction : NSObject <MTLFunction> {
 @public
  const msl_kernel* kernel;
}
@end
@implementation SimulatorFunction
- (NSString*)name {
  return [NSString stringWithUTF8String:kernel->name];
}
@end

@interface SimulatorLibrary : NSObject <MTLLibrary> {
 @public
  Kernels kernels;
}
@end
@implementation SimulatorLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName {
  const msl_kernel* found = find(kernels, [functionName UTF8String]);
  if (!found) return nil;
  SimulatorFunction* function = [SimulatorFunction new];
  function->kernel = found;
  return function;
}
- (NSArray*)functionNames {
  std::vector<id> names;
  for (int i = 0; i < kernels.count; i++)
    names.push_back([NSString stringWithUTF8String:kernels.first[i].name]);
  return [NSArray arrayWithObjects:names.data() count:names.size()];
}
@end

@implementation SimulatorPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return simulator::thread_limit(*kernel);
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return 0;  // the executor lays it out, and counts it against the 32 KiB when it runs
}
@end

static id<MTLLibrary> compiled(const std::string& source, NSError** error) {
  std::string message;
  const std::string path = simulator::compile_shader(source, message);
  if (path.empty()) {
    set_error(error, message);
    return nil;
  }
  SimulatorLibrary* library = [SimulatorLibrary new];
  library->kernels = load(path);
  return library;
}

id<MTLLibrary> simulated_library(NSString* source, MTLCompileOptions* options, NSError** error) {
  if (simulator::is_strict() && (!options || options.mathMode != MTLMathModeSafe ||
                                 options.mathFloatingPointFunctions == MTLMathFloatingPointFunctionsFast)) {
    set_error(
        error,
        "the library is compiled with fast math, which is Metal's default: NaN and infinity are part of "
        "the operators' contract, set mathMode = MTLMathModeSafe and mathFloatingPointFunctions = "
        "MTLMathFloatingPointFunctionsPrecise, before macOS 15 fastMathEnabled = NO");
    return nil;
  }
  const std::string text = [source UTF8String];
  const bool has_tensors = text.find("MetalPerformancePrimitives") != std::string::npos;
  if (has_tensors && options && options.languageVersion < MTLLanguageVersion4_0) {
    set_error(error, "MetalPerformancePrimitives needs language version 4.0");
    return nil;
  }
  if (simulator::is_strict() && !has_tensors && options.languageVersion > MTLLanguageVersion3_1) {
    set_error(error, "the language version is over 3.1, which is what the package promises to compile with");
    return nil;
  }
  return compiled(text, error);
}

id<MTLLibrary> simulated_compiled_library(NSURL* url, NSError** error) {
  std::ifstream file([[url path] UTF8String]);
  std::string first;
  std::getline(file, first);
  if (first != "simulated metallib") {
    set_error(error, "the file is no library");
    return nil;
  }
  std::ostringstream text;
  text << file.rdbuf();
  return compiled(text.str(), error);
}

id<MTLComputePipelineState> simulated_pipeline(id<MTLFunction> function, NSError** error) {
  if (!function) {
    set_error(error, "newComputePipelineStateWithFunction: the function is nil");
    return nil;
  }
  SimulatorPipeline* pipeline = [SimulatorPipeline new];
  pipeline->kernel = ((SimulatorFunction*)function)->kernel;
  return pipeline;
}
