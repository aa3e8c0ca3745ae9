// Host code for test_simulator_host.py: one operator a call, right or wrong, encoded as the package's own
// host code does.
#include <ATen/ATen.h>
#include <ATen/mps/MPSStream.h>
#include <torch/library.h>

#include <map>
#include <string>

namespace {

using at::Tensor;

id<MTLDevice> device() {
  return at::mps::getCurrentMPSStream()->device();
}

id<MTLLibrary> library(const std::string& source) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;
  options.fastMathEnabled = NO;
  NSError* error = nil;
  id<MTLLibrary> built = [device() newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                options:options
                                                  error:&error];
  TORCH_CHECK(built, "shader: ", [[error localizedDescription] UTF8String]);
  return built;
}

id<MTLComputePipelineState> pipeline(id<MTLFunction> function) {
  NSError* error = nil;
  id<MTLComputePipelineState> built = [device() newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(built, "pipeline: ", [[error localizedDescription] UTF8String]);
  return built;
}

std::string shader_text;
void set_shader(const std::string& source) {
  @autoreleasepool {
    library(source);
    shader_text = source;
  }
}

id<MTLComputePipelineState> kernel(const std::string& name) {
  static std::map<std::string, id<MTLComputePipelineState>> pipelines;
  id<MTLComputePipelineState>& slot = pipelines[name];
  if (!slot) {
    id<MTLFunction> function =
        [library(shader_text) newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]];
    TORCH_CHECK(function, "no kernel ", name);
    slot = pipeline(function);
  }
  return slot;
}

id<MTLBuffer> buffer(const Tensor& tensor) {
  return __builtin_bit_cast(id<MTLBuffer>, tensor.storage().data());
}

void set(id<MTLComputeCommandEncoder> encoder, const Tensor& tensor, int index) {
  [encoder setBuffer:buffer(tensor) offset:tensor.storage_offset() * tensor.element_size() atIndex:index];
}

using Encode = void (^)(id<MTLComputeCommandEncoder>);

// Runs `encode` with the stream's encoder, in a block of the stream's queue.
void in_block(Encode encode) {
  @autoreleasepool {
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
      @autoreleasepool {
        encode(stream->commandEncoder());
      }
    });
  }
}

void bind_axpy(id<MTLComputeCommandEncoder> encoder, const Tensor& x, const Tensor& y, const Tensor& out,
               float alpha) {
  [encoder setComputePipelineState:kernel("axpy")];
  set(encoder, x, 0);
  set(encoder, y, 1);
  set(encoder, out, 2);
  [encoder setBytes:&alpha length:sizeof(alpha) atIndex:3];
}

Tensor axpy(const Tensor& x, const Tensor& y, double alpha) {
  Tensor out = at::empty_like(x);
  in_block(^(id<MTLComputeCommandEncoder> encoder) {
    TORCH_CHECK(alpha != 13, "alpha is unlucky");
    bind_axpy(encoder, x, y, out, static_cast<float>(alpha));
    const NSUInteger count = x.numel();
    [encoder dispatchThreads:MTLSizeMake(count, 1, 1)
        threadsPerThreadgroup:MTLSizeMake(std::min<NSUInteger>(count, 64), 1, 1)];
  });
  return out;
}

// The grid of the second command is what the first command writes.
Tensor indirect(const Tensor& groups) {
  Tensor grid = at::empty({5}, groups.options());
  Tensor out = at::zeros({16}, groups.options());
  in_block(^(id<MTLComputeCommandEncoder> encoder) {
    [encoder setComputePipelineState:kernel("make_grid")];
    set(encoder, groups, 0);
    set(encoder, grid, 1);
    [encoder dispatchThreads:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
    [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    [encoder setComputePipelineState:kernel("mark")];
    set(encoder, out, 0);
    [encoder dispatchThreadgroupsWithIndirectBuffer:buffer(grid)
                               indirectBufferOffset:8
                              threadsPerThreadgroup:MTLSizeMake(2, 1, 1)];
  });
  return out;
}

Tensor constants(bool flag, int64_t count, double scale) {
  Tensor out = at::empty({3}, at::TensorOptions().device(at::kMPS).dtype(at::kFloat));
  in_block(^(id<MTLComputeCommandEncoder> encoder) {
    MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
    const int32_t number = static_cast<int32_t>(count);
    const float factor = static_cast<float>(scale);
    [values setConstantValue:&flag type:MTLDataTypeBool atIndex:0];
    [values setConstantValue:&number type:MTLDataTypeInt atIndex:1];
    [values setConstantValue:&factor type:MTLDataTypeFloat atIndex:2];
    NSError* error = nil;
    id<MTLFunction> function = [library(shader_text) newFunctionWithName:@"constants"
                                                          constantValues:values
                                                                   error:&error];
    TORCH_CHECK(function, [[error localizedDescription] UTF8String]);
    [encoder setComputePipelineState:[pipeline(function) autorelease]];
    [function release];
    set(encoder, out, 0);
    [encoder dispatchThreads:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
  });
  return out;
}

// --- faults
// -------------------------------------------------------------------------------------------------------

using Fault = void (*)(const Tensor& x);

void with_axpy(const Tensor& x, Encode then) {
  Tensor out = at::empty_like(x);
  in_block(^(id<MTLComputeCommandEncoder> encoder) {
    bind_axpy(encoder, x, x, out, 1);
    then(encoder);
  });
}

void dispatch(id<MTLComputeCommandEncoder> encoder, NSUInteger groups, NSUInteger threads) {
  [encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

id<MTLComputeCommandEncoder> kept;

const std::map<std::string, Fault> faults = {
    {"unbound buffer",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setBuffer:nil offset:0 atIndex:1];
         dispatch(encoder, 1, 4);
       });
     }},
    {"buffer of an earlier block",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         dispatch(encoder, 1, 4);
       });
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setComputePipelineState:kernel("axpy")];
         dispatch(encoder, 1, 4);
       });
     }},
    {"offset out of range",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setBuffer:buffer(x) offset:x.storage().nbytes() atIndex:0];
       });
     }},
    {"setBufferOffset out of range",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setBufferOffset:x.storage().nbytes() + 4 atIndex:0];
       });
     }},
    {"unaligned reference",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setBuffer:buffer(x) offset:2 atIndex:3];
         dispatch(encoder, 1, 4);
       });
     }},
    {"short reference",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         const uint16_t half = 0;
         [encoder setBytes:&half length:sizeof(half) atIndex:3];
         dispatch(encoder, 1, 4);
       });
     }},
    {"tensor of the CPU",
     [](const Tensor& x) {
       Tensor other = x.cpu();
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         set(encoder, other, 0);
       });
     }},
    {"index over 30",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         set(encoder, x, 31);
       });
     }},
    {"range over 30",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         const id<MTLBuffer> buffers[] = {buffer(x), buffer(x)};
         const NSUInteger offsets[] = {0, 0};
         [encoder setBuffers:buffers offsets:offsets withRange:NSMakeRange(30, 2)];
       });
     }},
    {"setBytes for an output",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         const float four[4] = {};
         [encoder setBytes:four length:sizeof(four) atIndex:2];
         dispatch(encoder, 1, 4);
       });
     }},
    {"setBytes over 4096",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         const std::string bytes(4097, 'x');
         [encoder setBytes:bytes.data() length:bytes.size() atIndex:3];
       });
     }},
    {"threadgroup memory over 32 KiB",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setThreadgroupMemoryLength:32 * 1024 + 16 atIndex:0];
       });
     }},
    {"threadgroup memory over 32 KiB in sum",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setThreadgroupMemoryLength:16 * 1024 atIndex:0];
         [encoder setThreadgroupMemoryLength:16 * 1024 + 16 atIndex:1];
         dispatch(encoder, 1, 4);
       });
     }},
    {"threadgroup memory length",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setThreadgroupMemoryLength:100 atIndex:0];
       });
     }},
    {"threadgroup memory not set",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setComputePipelineState:kernel("scratch")];
         set(encoder, x, 0);
         dispatch(encoder, 1, 4);
       });
     }},
    {"too many threads",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(64, 17, 1)];
       });
     }},
    {"threads over the kernel's attribute",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setComputePipelineState:kernel("narrow")];
         set(encoder, x, 0);
         dispatch(encoder, 1, 65);
       });
     }},
    {"no threads",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         dispatch(encoder, 1, 0);
       });
     }},
    {"empty grid",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         dispatch(encoder, 0, 4);
       });
     }},
    {"indirect offset",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder dispatchThreadgroupsWithIndirectBuffer:buffer(x)
                                    indirectBufferOffset:6
                                   threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
       });
     }},
    {"indirect out of range",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         [encoder dispatchThreadgroupsWithIndirectBuffer:buffer(x)
                                    indirectBufferOffset:x.storage().nbytes() - 8
                                   threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
       });
     }},
    {"no pipeline",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         dispatch(encoder, 1, 4);
       });
     }},
    {"nil pipeline",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setComputePipelineState:nil];
       });
     }},
    {"nested dispatch_sync",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         axpy(x, x, 1);
       });
     }},
    {"reading a tensor inside a block",
     [](const Tensor& x) {
       with_axpy(x, ^(id<MTLComputeCommandEncoder> encoder) {
         dispatch(encoder, 1, 4);
         x.cpu();
       });
     }},
    {"exception through dispatch_sync",
     [](const Tensor& x) {
       dispatch_sync(at::mps::getCurrentMPSStream()->queue(), ^{
         TORCH_CHECK(false, "thrown inside");
       });
     }},
    {"encoder kept",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         kept = encoder;
       });
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [kept setComputePipelineState:kernel("axpy")];
       });
     }},
    {"encoder after its block",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         kept = encoder;
       });
       set(kept, x, 0);
     }},
    {"encoder outside of a block", [](const Tensor& x) { at::mps::getCurrentMPSStream()->commandEncoder(); }},
    {"encoder in a block of another queue",
     [](const Tensor& x) {
       static dispatch_queue_t other = dispatch_queue_create("other", DISPATCH_QUEUE_SERIAL);
       at::mps::dispatch_sync_with_rethrow(other, ^{
         at::mps::getCurrentMPSStream()->commandEncoder();
       });
     }},
    {"ending the encoder",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [encoder endEncoding];
       });
     }},
    {"own device", [](const Tensor& x) { MTLCreateSystemDefaultDevice(); }},
    {"own queue", [](const Tensor& x) { [device() newCommandQueue]; }},
    {"own command buffer",
     [](const Tensor& x) { [at::mps::getCurrentMPSStream()->commandQueue() commandBuffer]; }},
    {"own encoder",
     [](const Tensor& x) { [at::mps::getCurrentMPSStream()->commandBuffer() computeCommandEncoder]; }},
    {"commit", [](const Tensor& x) { [at::mps::getCurrentMPSStream()->commandBuffer() commit]; }},
    {"wait", [](const Tensor& x) { [at::mps::getCurrentMPSStream()->commandBuffer() waitUntilCompleted]; }},
    {"stream synchronize",
     [](const Tensor& x) {
       at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
     }},
    {"commit outside of a block",
     [](const Tensor& x) { at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT); }},
    {"encoder after a commit",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
         [encoder setComputePipelineState:kernel("axpy")];
       });
     }},
    {"overrun",
     [](const Tensor& x) {
       in_block(^(id<MTLComputeCommandEncoder> encoder) {
         [encoder setComputePipelineState:kernel("overrun")];
         set(encoder, x, 0);
         dispatch(encoder, 1, 4);
       });
     }},
    {"object that is not released",
     [](const Tensor& x) {
       @autoreleasepool {
         [library(shader_text) newFunctionWithName:@"axpy"];
       }
     }},
    {"autorelease without pool", [](const Tensor& x) { [NSString stringWithUTF8String:"leaks"]; }},
    {"fast math",
     [](const Tensor& x) {
       @autoreleasepool {
         NSError* error = nil;
         id<MTLLibrary> built = [device() newLibraryWithSource:@"" options:nil error:&error];
         TORCH_CHECK(built, [[error localizedDescription] UTF8String]);
       }
     }},
    {"language 3.2",
     [](const Tensor& x) {
       @autoreleasepool {
         MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
         options.mathMode = MTLMathModeSafe;
         options.languageVersion = MTLLanguageVersion3_2;
         NSError* error = nil;
         id<MTLLibrary> built = [device() newLibraryWithSource:@"" options:options error:&error];
         TORCH_CHECK(built, [[error localizedDescription] UTF8String]);
       }
     }},
};

void commit_fault(const std::string& name, const Tensor& x) {
  faults.at(name)(x);
}

void commit() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    stream->synchronize(at::mps::SyncType::COMMIT);
  });
}

TORCH_LIBRARY(simulator_test, m) {
  m.def("set_shader(str source) -> ()", set_shader);
  m.def("axpy(Tensor x, Tensor y, float alpha) -> Tensor", axpy);
  m.def("indirect(Tensor groups) -> Tensor", indirect);
  m.def("constants(bool flag, int count, float scale) -> Tensor", constants);
  m.def("commit() -> ()", commit);
  m.def("fault(str name, Tensor x) -> ()", commit_fault);
  m.def("no_kernel(Tensor x) -> Tensor");
}

}  // namespace
