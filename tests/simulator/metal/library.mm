// MTLCompileOptions, MTLLibrary, MTLFunction, MTLComputePipelineState: MSL source to a kernel that can be
// run.
#include <dlfcn.h>
#import <Metal/Metal.h>

#include <mutex>
#include <sstream>

#include "metal.h"
#include "runtime.h"

using simulator::Constants;
using simulator::ConstantValue;

namespace {

// Every message to the user names Metal's error domain through NSError, as Metal's own do.
void set_error(NSError** error, const std::string& message) {
  if (!error) return;
  @autoreleasepool {
    NSString* text = [NSString stringWithUTF8String:message.c_str()];
    NSDictionary* info = [NSDictionary dictionaryWithObject:text forKey:NSLocalizedDescriptionKey];
    *error = [[NSError errorWithDomain:@"MTLLibraryErrorDomain" code:3 userInfo:info] retain];
  }
  [*error autorelease];
}

struct Kernels {
  const msl_kernel* first = nullptr;
  int count = 0;
};

// Loaded libraries stay: recorded commands and pipelines point into them.
Kernels load(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, Kernels> loaded;
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, is_new] = loaded.try_emplace(path);
  if (is_new) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) simulator::fail(std::string("the translated shader does not load: ") + dlerror());
    auto kernels = reinterpret_cast<msl_kernels_fn>(dlsym(handle, "msl_kernels"));
    if (!kernels) simulator::fail("the translated shader " + path + " exports no msl_kernels");
    entry->second.first = kernels(&entry->second.count);
  }
  return entry->second;
}

const msl_kernel* find(const Kernels& kernels, const std::string& name) {
  for (int i = 0; i < kernels.count; i++) {
    if (name == kernels.first[i].name) return &kernels.first[i];
  }
  return nullptr;
}

std::string macro_text(NSDictionary* macros) {
  std::ostringstream text;
  NSArray* keys = [macros allKeys];
  for (NSUInteger i = 0; i < [keys count]; i++) {
    NSString* key = [keys objectAtIndex:i];
    id value = [macros objectForKey:key];
    text << "#define " << [key UTF8String] << " ";
    if ([value isKindOfClass:[NSNumber class]]) {
      text << [(NSNumber*)value longValue] << "\n";
    } else {
      text << [(NSString*)value UTF8String] << "\n";
    }
  }
  return text.str().empty() ? "" : text.str() + "#line 1\n";
}

}  // namespace

@implementation MTLCompileOptions
- (instancetype)init {
  _version = MTLLanguageVersion3_2;
  _mathMode = MTLMathModeFast;
  return self;
}
- (NSDictionary*)preprocessorMacros {
  return _macros;
}
- (void)setPreprocessorMacros:(NSDictionary*)macros {
  [macros retain];
  [_macros release];
  _macros = macros;
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
}
- (void)dealloc {
  [_macros release];
  [super dealloc];
}
@end

@implementation MTLFunctionConstantValues
- (instancetype)init {
  _values = new Constants;
  return self;
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  ConstantValue& slot = (*static_cast<Constants*>(_values))[static_cast<unsigned>(index)];
  switch (type) {
    case MTLDataTypeBool:
      slot = *static_cast<const bool*>(value);
      return;
    case MTLDataTypeFloat:
      slot = static_cast<double>(*static_cast<const float*>(value));
      return;
    case MTLDataTypeHalf:
      slot = static_cast<double>(*static_cast<const _Float16*>(value));
      return;
    case MTLDataTypeInt:
      slot = static_cast<long long>(*static_cast<const int32_t*>(value));
      return;
    case MTLDataTypeUInt:
      slot = static_cast<long long>(*static_cast<const uint32_t*>(value));
      return;
    case MTLDataTypeShort:
      slot = static_cast<long long>(*static_cast<const int16_t*>(value));
      return;
    case MTLDataTypeUShort:
      slot = static_cast<long long>(*static_cast<const uint16_t*>(value));
      return;
    case MTLDataTypeChar:
      slot = static_cast<long long>(*static_cast<const int8_t*>(value));
      return;
    case MTLDataTypeUChar:
      slot = static_cast<long long>(*static_cast<const uint8_t*>(value));
      return;
  }
  simulator::fail("setConstantValue: data type " + std::to_string(type) + " is not simulated");
}
- (void)reset {
  static_cast<Constants*>(_values)->clear();
}
- (void)dealloc {
  delete static_cast<Constants*>(_values);
  [super dealloc];
}
@end

@interface SimulatorFunction : NSObject <MTLFunction> {
 @public
  std::shared_ptr<const simulator::Kernel>* kernel;
}
@end
@implementation SimulatorFunction
- (NSString*)name {
  return [NSString stringWithUTF8String:(*kernel)->kernel->name];
}
- (void)dealloc {
  delete kernel;
  [super dealloc];
}
@end

@interface SimulatorLibrary : NSObject <MTLLibrary> {
 @public
  std::string* source;
  NSString* name;
}
@end
@implementation SimulatorLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName {
  return [self newFunctionWithName:functionName constants:Constants() error:nullptr];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName
                        constantValues:(MTLFunctionConstantValues*)constantValues
                                 error:(NSError**)error {
  return [self newFunctionWithName:functionName
                         constants:*static_cast<Constants*>(constantValues->_values)
                             error:error];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName
                             constants:(const Constants&)constants
                                 error:(NSError**)error {
  std::string message;
  const std::string path = simulator::compile_shader(*source, constants, message);
  if (path.empty()) {
    set_error(error, message);
    return nil;
  }
  const msl_kernel* found = find(load(path), [functionName UTF8String]);
  if (!found) {
    set_error(error, std::string("Function ") + [functionName UTF8String] + " was not found in the library");
    return nil;
  }
  SimulatorFunction* function = [SimulatorFunction new];
  function->kernel = new std::shared_ptr<const simulator::Kernel>(std::make_shared<simulator::Kernel>(
      simulator::Kernel{found, found->name + simulator::to_text(constants)}));
  return function;
}
- (NSArray*)functionNames {
  std::string message;
  const Kernels kernels = load(simulator::compile_shader(*source, Constants(), message));
  std::vector<id> names;
  for (int i = 0; i < kernels.count; i++)
    names.push_back([NSString stringWithUTF8String:kernels.first[i].name]);
  return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (NSString*)label {
  return name;
}
- (void)setLabel:(NSString*)label {
  [label retain];
  [name release];
  name = label;
}
- (void)dealloc {
  delete source;
  [name release];
  [super dealloc];
}
@end

@implementation SimulatorPipeline
- (NSString*)label {
  return nil;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return simulator::thread_limit(*(*kernel)->kernel);
}
- (id<MTLDevice>)device {
  return simulated_device();
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return 0;  // the executor lays it out, and counts it against the 32 KiB when it runs
}
- (void)dealloc {
  delete kernel;
  [super dealloc];
}
@end

id<MTLLibrary> simulated_library(NSString* source, MTLCompileOptions* options, NSError** error) {
  if (simulator::is_strict() && (!options || options.mathMode != MTLMathModeSafe)) {
    set_error(
        error,
        "the library is compiled with fast math, which is Metal's default: NaN and infinity are part of the "
        "operators' contract, set mathMode = MTLMathModeSafe or fastMathEnabled = NO");
    return nil;
  }
  std::string text;
  @autoreleasepool {
    text = (options ? macro_text(options.preprocessorMacros) : "") + [source UTF8String];
  }
  const bool has_tensors = text.find("MetalPerformancePrimitives") != std::string::npos;
  if (has_tensors && options && options.languageVersion < MTLLanguageVersion4_0) {
    set_error(error, "MetalPerformancePrimitives needs language version 4.0");
    return nil;
  }
  if (simulator::is_strict() && !has_tensors && options.languageVersion > MTLLanguageVersion3_1) {
    set_error(error, "the language version is over 3.1, which is what the package promises to compile with");
    return nil;
  }
  // A source with function constants is compiled when their values are known.
  if (text.find("function_constant") == std::string::npos) {
    std::string message;
    if (simulator::compile_shader(text, Constants(), message).empty()) {
      set_error(error, message);
      return nil;
    }
  }
  SimulatorLibrary* library = [SimulatorLibrary new];
  library->source = new std::string(std::move(text));
  return library;
}

id<MTLComputePipelineState> simulated_pipeline(id<MTLFunction> function, NSError** error) {
  if (!function) {
    set_error(error, "newComputePipelineStateWithFunction: the function is nil");
    return nil;
  }
  SimulatorPipeline* pipeline = [SimulatorPipeline new];
  pipeline->kernel = new std::shared_ptr<const simulator::Kernel>(*((SimulatorFunction*)function)->kernel);
  return pipeline;
}
