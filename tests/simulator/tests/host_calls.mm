// Host code for test_host.py: one operator a call, right or wrong, encoded as the
// package's own host code does.
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <torch/library.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace simulator {
struct AsTorch {
  AsTorch();
  ~AsTorch();
};
}  // namespace simulator

namespace {

using at::Tensor;
using Encoder = id<MTLComputeCommandEncoder>;

at::mps::MPSStream* stream() {
  return at::mps::getCurrentMPSStream();
}

id<MTLDevice> device() {
  return stream()->device();
}

MTLCompileOptions* language(MTLLanguageVersion version) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  options.languageVersion = version;
  options.mathMode = MTLMathModeSafe;
  options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
  return options;
}

id<MTLLibrary> library(const std::string& source, MTLCompileOptions* options) {
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
    library(source, language(MTLLanguageVersion3_1));
    shader_text = source;
  }
}

id<MTLLibrary> shader_library() {
  return library(shader_text, language(MTLLanguageVersion3_1));
}

id<MTLComputePipelineState> kernel(const std::string& name) {
  static std::map<std::string, id<MTLComputePipelineState>> pipelines;
  id<MTLComputePipelineState>& slot = pipelines[name];
  if (!slot) {
    id<MTLFunction> function =
        [shader_library() newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]];
    TORCH_CHECK(function, "no kernel ", name);
    slot = pipeline(function);
  }
  return slot;
}

id<MTLBuffer> buffer(const Tensor& tensor) {
  return __builtin_bit_cast(id<MTLBuffer>, tensor.storage().data());
}

id<MTLResidencySet> residency_set() {
  MTLResidencySetDescriptor* descriptor = [MTLResidencySetDescriptor new];
  id<MTLResidencySet> made = [device() newResidencySetWithDescriptor:descriptor error:nil];
  [descriptor release];
  return made;
}

void set(Encoder encoder, const Tensor& tensor, int index) {
  [encoder setBuffer:buffer(tensor) offset:tensor.storage_offset() * tensor.element_size() atIndex:index];
}

using Encode = void (^)(Encoder);

// Runs `encode` with the stream's encoder, in a block of the stream's queue.
void in_block(Encode encode) {
  @autoreleasepool {
    at::mps::dispatch_sync_with_rethrow(stream()->queue(), ^{
      @autoreleasepool {
        encode(stream()->commandEncoder());
      }
    });
  }
}

// The same without an encoder.
void in_plain_block(void (^encode)()) {
  at::mps::dispatch_sync_with_rethrow(stream()->queue(), ^{
    @autoreleasepool {
      stream()->endKernelCoalescing();
      encode();
    }
  });
}

id<MTLSharedEvent> event() {
  static const id<MTLSharedEvent> made = [device() newSharedEvent];
  return made;
}

void bind_axpy(Encoder encoder, const Tensor& x, const Tensor& y, const Tensor& out, float alpha) {
  [encoder setComputePipelineState:kernel("axpy")];
  set(encoder, x, 0);
  set(encoder, y, 1);
  set(encoder, out, 2);
  [encoder setBytes:&alpha length:sizeof(alpha) atIndex:3];
}

void axpy_into(const Tensor& x, const Tensor& y, double alpha, const Tensor& out) {
  in_block(^(Encoder encoder) {
    TORCH_CHECK(alpha != 13, "alpha is unlucky");
    bind_axpy(encoder, x, y, out, static_cast<float>(alpha));
    const NSUInteger count = x.numel();
    [encoder dispatchThreads:MTLSizeMake(count, 1, 1)
        threadsPerThreadgroup:MTLSizeMake(std::min<NSUInteger>(count, 64), 1, 1)];
  });
}

Tensor axpy(const Tensor& x, const Tensor& y, double alpha) {
  Tensor out = at::empty_like(x);
  axpy_into(x, y, alpha, out);
  return out;
}

// The grid of the second command is what the first command writes.
Tensor indirect(const Tensor& groups) {
  Tensor grid = at::empty({5}, groups.options());
  Tensor out = at::zeros({16}, groups.options());
  in_block(^(Encoder encoder) {
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

// --- faults

void dispatch(Encoder encoder, NSUInteger groups, NSUInteger threads) {
  [encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

Encoder kept;

// What is wrong within one block, in which axpy is set and bound.
const std::map<std::string, void (*)(Encoder, const Tensor&)> faults_in_a_block = {
    {"unbound buffer",
     [](Encoder encoder, const Tensor& x) {
       [encoder setBuffer:nil offset:0 atIndex:1];
       dispatch(encoder, 1, 4);
     }},
    {"offset out of range",
     [](Encoder encoder, const Tensor& x) {
       [encoder setBuffer:buffer(x) offset:x.storage().nbytes() atIndex:0];
     }},
    {"unaligned reference",
     [](Encoder encoder, const Tensor& x) {
       [encoder setBuffer:buffer(x) offset:2 atIndex:3];
       dispatch(encoder, 1, 4);
     }},
    {"short reference",
     [](Encoder encoder, const Tensor& x) {
       const uint16_t half = 0;
       [encoder setBytes:&half length:sizeof(half) atIndex:3];
       dispatch(encoder, 1, 4);
     }},
    {"tensor of the CPU", [](Encoder encoder, const Tensor& x) { set(encoder, at::ones({100}), 0); }},
    {"index over 30", [](Encoder encoder, const Tensor& x) { set(encoder, x, 31); }},
    {"range over 30",
     [](Encoder encoder, const Tensor& x) {
       const id<MTLBuffer> buffers[] = {buffer(x), buffer(x)};
       const NSUInteger offsets[] = {0, 0};
       [encoder setBuffers:buffers offsets:offsets withRange:NSMakeRange(30, 2)];
     }},
    {"setBytes for an output",
     [](Encoder encoder, const Tensor& x) {
       const float four[4] = {};
       [encoder setBytes:four length:sizeof(four) atIndex:2];
       dispatch(encoder, 1, 4);
     }},
    {"setBytes over 4096",
     [](Encoder encoder, const Tensor& x) {
       const std::string bytes(4097, 'x');
       [encoder setBytes:bytes.data() length:bytes.size() atIndex:3];
     }},
    {"threadgroup memory over 32 KiB",
     [](Encoder encoder, const Tensor& x) { [encoder setThreadgroupMemoryLength:32 * 1024 + 16 atIndex:0]; }},
    {"threadgroup memory over 32 KiB in sum",
     [](Encoder encoder, const Tensor& x) {
       [encoder setThreadgroupMemoryLength:16 * 1024 atIndex:0];
       [encoder setThreadgroupMemoryLength:16 * 1024 + 16 atIndex:1];
       dispatch(encoder, 1, 4);
     }},
    {"threadgroup memory length",
     [](Encoder encoder, const Tensor& x) { [encoder setThreadgroupMemoryLength:100 atIndex:0]; }},
    {"threadgroup memory not set",
     [](Encoder encoder, const Tensor& x) {
       [encoder setComputePipelineState:kernel("scratch")];
       set(encoder, x, 0);
       dispatch(encoder, 1, 4);
     }},
    {"too many threads",
     [](Encoder encoder, const Tensor& x) {
       [encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(64, 17, 1)];
     }},
    {"threads over the kernel's attribute",
     [](Encoder encoder, const Tensor& x) {
       [encoder setComputePipelineState:kernel("narrow")];
       set(encoder, x, 0);
       dispatch(encoder, 1, 65);
     }},
    {"no threads", [](Encoder encoder, const Tensor& x) { dispatch(encoder, 1, 0); }},
    {"empty grid", [](Encoder encoder, const Tensor& x) { dispatch(encoder, 0, 4); }},
    {"indirect offset",
     [](Encoder encoder, const Tensor& x) {
       [encoder dispatchThreadgroupsWithIndirectBuffer:buffer(x)
                                  indirectBufferOffset:6
                                 threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
     }},
    {"indirect out of range",
     [](Encoder encoder, const Tensor& x) {
       [encoder dispatchThreadgroupsWithIndirectBuffer:buffer(x)
                                  indirectBufferOffset:x.storage().nbytes() - 8
                                 threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
     }},
    {"nil pipeline", [](Encoder encoder, const Tensor& x) { [encoder setComputePipelineState:nil]; }},
    {"nested dispatch_sync", [](Encoder encoder, const Tensor& x) { axpy(x, x, 1); }},
    {"reading a tensor inside a block",
     [](Encoder encoder, const Tensor& x) {
       dispatch(encoder, 1, 4);
       x.cpu();
     }},
    {"ending the encoder", [](Encoder encoder, const Tensor& x) { [encoder endEncoding]; }},
    {"encoder after a commit",
     [](Encoder encoder, const Tensor& x) {
       stream()->synchronize(at::mps::SyncType::COMMIT);
       [encoder setComputePipelineState:kernel("axpy")];
     }},
    {"overrun",
     [](Encoder encoder, const Tensor& x) {
       [encoder setComputePipelineState:kernel("overrun")];
       set(encoder, x, 0);
       dispatch(encoder, 1, 4);
     }},
};

void with_axpy(const Tensor& x, Encode then) {
  Tensor out = at::empty_like(x);
  in_block(^(Encoder encoder) {
    bind_axpy(encoder, x, x, out, 1);
    then(encoder);
  });
}

// Command buffers of the host's own, which only torch may have.
using Buffer = id<MTLCommandBuffer>;

id<MTLCommandQueue> own_queue() {
  const simulator::AsTorch torch;
  static const id<MTLCommandQueue> made = [device() newCommandQueue];
  return made;
}

void with_own_buffer(const std::function<void(Buffer)>& act) {
  const simulator::AsTorch torch;
  @autoreleasepool {
    act([own_queue() commandBuffer]);
  }
}

// An encoder that ends where a fault leaves it.
struct OpenEncoder {
  explicit OpenEncoder(Buffer buffer) : encoder([buffer computeCommandEncoder]) {}
  ~OpenEncoder() { [encoder endEncoding]; }
  const Encoder encoder;
};

void commit_twice(Buffer buffer) {
  [buffer commit];
  [buffer commit];
}

const std::map<std::string, void (*)(Buffer)> faults_of_own_buffers = {
    {"second encoder",
     [](Buffer buffer) {
       const OpenEncoder open(buffer);
       [buffer blitCommandEncoder];
     }},
    {"commit with an encoder",
     [](Buffer buffer) {
       const OpenEncoder open(buffer);
       [buffer commit];
     }},
    {"signal with an encoder",
     [](Buffer buffer) {
       const OpenEncoder open(buffer);
       [buffer encodeSignalEvent:event() value:1];
     }},
    {"encoder that ends twice",
     [](Buffer buffer) {
       const Encoder encoder = [buffer computeCommandEncoder];
       [encoder endEncoding];
       [encoder endEncoding];
     }},
    {"encoding after the end",
     [](Buffer buffer) {
       const id<MTLBlitCommandEncoder> encoder = [buffer blitCommandEncoder];
       [encoder endEncoding];
       [encoder fillBuffer:nil range:NSMakeRange(0, 4) value:0];
     }},
    {"encoder after the commit",
     [](Buffer buffer) {
       [buffer commit];
       [buffer computeCommandEncoder];
     }},
    {"commit twice", commit_twice},
    {"enqueue after the commit",
     [](Buffer buffer) {
       [buffer commit];
       [buffer enqueue];
     }},
    {"scheduled handler after the commit",
     [](Buffer buffer) {
       [buffer commit];
       [buffer addScheduledHandler:^(Buffer){
       }];
     }},
    {"wait before the commit", [](Buffer buffer) { [buffer waitUntilCompleted]; }},
    {"wait behind an enqueued buffer",
     [](Buffer buffer) {
       [[own_queue() commandBuffer] enqueue];
       [buffer commit];
       [buffer waitUntilCompleted];
     }},
    {"encoder that is released", [](Buffer buffer) { [buffer computeCommandEncoder]; }},
};

const std::map<std::string, void (*)(const Tensor& x)> other_faults = {
    {"signal beside another thread's encoder",
     [](const Tensor& x) {
       std::thread([] {
         in_block(^(Encoder){
         });
       }).join();
       at::mps::dispatch_sync_with_rethrow(stream()->queue(), ^{
         [[stream()->commandBuffer() rootCommandBuffer] encodeSignalEvent:event() value:1];
       });
     }},
    {"commit of the stream with an encoder",
     [](const Tensor& x) {
       in_plain_block(^{
         const simulator::AsTorch torch;
         const OpenEncoder open([stream()->commandBuffer() rootCommandBuffer]);
         stream()->synchronize(at::mps::SyncType::COMMIT);
       });
     }},
    {"buffer of an earlier block",
     [](const Tensor& x) {
       with_axpy(x, ^(Encoder encoder) {
         dispatch(encoder, 1, 4);
       });
       in_block(^(Encoder encoder) {
         [encoder setComputePipelineState:kernel("axpy")];
         dispatch(encoder, 1, 4);
       });
     }},
    {"threadgroup memory that stays",
     [](const Tensor& x) {
       in_block(^(Encoder encoder) {
         [encoder setComputePipelineState:kernel("scratch")];
         set(encoder, x, 0);
         [encoder setThreadgroupMemoryLength:64 atIndex:0];
         dispatch(encoder, 1, 4);
       });
       with_axpy(x, ^(Encoder encoder) {
         dispatch(encoder, 1, 4);
       });
     }},
    {"no pipeline",
     [](const Tensor& x) {
       in_block(^(Encoder encoder) {
         dispatch(encoder, 1, 4);
       });
     }},
    {"exception through dispatch_sync",
     [](const Tensor& x) {
       dispatch_sync(stream()->queue(), ^{
         TORCH_CHECK(false, "thrown inside");
       });
     }},
    {"encoder kept",
     [](const Tensor& x) {
       in_block(^(Encoder encoder) {
         kept = encoder;
       });
       in_block(^(Encoder encoder) {
         [kept setComputePipelineState:kernel("axpy")];
       });
     }},
    {"encoder after its block",
     [](const Tensor& x) {
       in_block(^(Encoder encoder) {
         kept = encoder;
       });
       set(kept, x, 0);
     }},
    {"encoder outside of a block", [](const Tensor& x) { stream()->commandEncoder(); }},
    {"encoder in a block of another queue",
     [](const Tensor& x) {
       static dispatch_queue_t other = dispatch_queue_create("other", DISPATCH_QUEUE_SERIAL);
       at::mps::dispatch_sync_with_rethrow(other, ^{
         stream()->commandEncoder();
       });
     }},
    {"residency of a buffer of a heap", [](const Tensor& x) { [residency_set() addAllocation:buffer(x)]; }},
    {"residency before the commit",
     [](const Tensor& x) {
       id<MTLResidencySet> set = residency_set();
       [set addAllocation:buffer(x)];
       [set requestResidency];
     }},
    {"residency without a request", [](const Tensor& x) { [residency_set() endResidency]; }},
    {"removal of what is not there", [](const Tensor& x) { [residency_set() removeAllocation:buffer(x)]; }},
    {"residency that does not end",
     [](const Tensor& x) {
       id<MTLResidencySet> set = residency_set();
       [set requestResidency];
       [set release];
     }},
    {"own device", [](const Tensor& x) { MTLCreateSystemDefaultDevice(); }},
    {"own memory on the stream",
     [](const Tensor& x) {
       static const id<MTLBuffer> own = [device() newBufferWithLength:400
                                                              options:MTLResourceStorageModeShared];
       in_block(^(Encoder encoder) {
         [encoder setBuffer:own offset:0 atIndex:0];
       });
     }},
    {"a tensor on an own queue",
     [](const Tensor& x) {
       @autoreleasepool {
         static const id<MTLCommandQueue> queue = [device() newCommandQueue];
         const Encoder encoder = [[queue commandBuffer] computeCommandEncoder];
         try {
           [encoder setBuffer:buffer(x) offset:0 atIndex:0];
         } catch (...) {
           [encoder endEncoding];
           throw;
         }
       }
     }},
    {"own heap", [](const Tensor& x) { [device() newHeapWithDescriptor:[MTLHeapDescriptor new]]; }},
    {"own blits", [](const Tensor& x) { [stream()->commandBuffer() blitCommandEncoder]; }},
    {"own buffers of the stream",
     [](const Tensor& x) { [MPSCommandBuffer commandBufferFromCommandQueue:stream()->commandQueue()]; }},
    {"own command buffer", [](const Tensor& x) { [stream()->commandQueue() commandBuffer]; }},
    {"own encoder", [](const Tensor& x) { [stream()->commandBuffer() computeCommandEncoder]; }},
    {"commit", [](const Tensor& x) { [stream()->commandBuffer() commit]; }},
    {"wait", [](const Tensor& x) { [stream()->commandBuffer() waitUntilCompleted]; }},
    {"handler after the commit",
     [](const Tensor& x) {
       const Tensor out = at::empty_like(x);
       in_block(^(Encoder encoder) {
         bind_axpy(encoder, x, x, out, 1);
         dispatch(encoder, 1, 1);
         id<MTLCommandBuffer> buffer = [stream()->commandBuffer() rootCommandBuffer];
         stream()->synchronize(at::mps::SyncType::COMMIT);
         [buffer addCompletedHandler:^(id<MTLCommandBuffer>){
         }];
       });
     }},
    {"signal beside an encoder",
     [](const Tensor& x) {
       in_block(^(Encoder) {
         [[stream()->commandBuffer() rootCommandBuffer] encodeSignalEvent:event() value:1];
       });
     }},
    {"wait outside of a block",
     [](const Tensor& x) {
       [[stream()->commandBuffer() rootCommandBuffer] encodeWaitForEvent:event() value:1];
     }},
    {"wait for no event",
     [](const Tensor& x) {
       in_plain_block(^{
         [stream()->commandBuffer() encodeWaitForEvent:nil value:1];
       });
     }},
    {"signal after the commit",
     [](const Tensor& x) {
       axpy(x, x, 1);
       in_plain_block(^{
         id<MTLCommandBuffer> buffer = [stream()->commandBuffer() rootCommandBuffer];
         stream()->synchronize(at::mps::SyncType::COMMIT);
         [buffer encodeSignalEvent:event() value:1];
       });
     }},
    {"listener of no one",
     [](const Tensor& x) {
       [event() notifyListener:nil
                       atValue:1
                         block:^(id<MTLSharedEvent>, uint64_t){
                         }];
     }},
    {"stream synchronize",
     [](const Tensor& x) { stream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT); }},
    {"commit outside of a block", [](const Tensor& x) { stream()->synchronize(at::mps::SyncType::COMMIT); }},
    {"object that is not released",
     [](const Tensor& x) {
       @autoreleasepool {
         [shader_library() newFunctionWithName:@"axpy"];
       }
     }},
    {"autorelease without pool", [](const Tensor& x) { [NSString stringWithUTF8String:"leaks"]; }},
    {"fast math",
     [](const Tensor& x) {
       @autoreleasepool {
         library("", nil);
       }
     }},
    {"language 3.2",
     [](const Tensor& x) {
       @autoreleasepool {
         library("", language(MTLLanguageVersion3_2));
       }
     }},
};

void commit_fault(const std::string& name, const Tensor& x) {
  if (const auto own = faults_of_own_buffers.find(name); own != faults_of_own_buffers.end())
    return with_own_buffer(own->second);
  const auto found = faults_in_a_block.find(name);
  if (found == faults_in_a_block.end()) return other_faults.at(name)(x);
  with_axpy(x, ^(Encoder encoder) {
    found->second(encoder, x);
  });
}

std::mutex completed_mutex;
std::vector<std::string> completed;  // what the handlers of `watch` have seen

void watch(const std::string& name) {
  in_block(^(Encoder) {
    id<MTLCommandBuffer> buffer = [stream()->commandBuffer() rootCommandBuffer];
    TORCH_CHECK([buffer status] == MTLCommandBufferStatusNotEnqueued && [buffer error] == nil);
    const std::string* kept = new std::string(name);
    [buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      NSError* error = [done error];
      const std::lock_guard<std::mutex> lock(completed_mutex);
      completed.push_back(c10::str(*kept, ": ", static_cast<unsigned long>([done status])));
      if (error)
        completed.back() += c10::str(" ", [error code], " ", [[error localizedDescription] UTF8String]);
      const double seconds = [done GPUEndTime] - [done GPUStartTime];
      if (seconds > 0) completed.back() += c10::str(" in ", seconds, " s");
      delete kept;
    }];
  });
}

std::vector<std::string> seen() {
  const std::lock_guard<std::mutex> lock(completed_mutex);
  return std::exchange(completed, {});
}

void commit() {
  at::mps::dispatch_sync_with_rethrow(stream()->queue(), ^{
    stream()->synchronize(at::mps::SyncType::COMMIT);
  });
}

void signal_by_gpu(int64_t value) {
  in_plain_block(^{
    [stream()->commandBuffer() encodeSignalEvent:event() value:value];
  });
}

void wait_by_gpu(int64_t value) {
  in_plain_block(^{
    [stream()->commandBuffer() encodeWaitForEvent:event() value:value];
  });
}

void signal_by_host(int64_t value) {
  [event() setSignaledValue:value];
}

int64_t signalled() {
  return static_cast<int64_t>([event() signaledValue]);
}

// Whether the value comes within that time.
bool wait_by_host(int64_t value, int64_t milliseconds) {
  return [event() waitUntilSignaledValue:value timeoutMS:milliseconds];
}

// The first float of a tensor, as the host finds it.
double first_of(const Tensor& x) {
  const id<MTLBuffer> buffer = __builtin_bit_cast(id<MTLBuffer>, x.storage().data());
  return *static_cast<const volatile float*>([buffer contents]);
}

// Where the host finds a tensor's memory.
int64_t contents(const Tensor& x) {
  return reinterpret_cast<int64_t>([buffer(x) contents]);
}

// Reads a file into a tensor's memory, from a byte of it on.
void read_file(const std::string& path, const Tensor& x, int64_t first, int64_t size) {
  const int file = open(path.c_str(), O_RDONLY);
  const iovec to = {static_cast<char*>([buffer(x) contents]) + first, static_cast<size_t>(size)};
  TORCH_CHECK(preadv(file, &to, 1, 0) == size, "reading ", path, ": ", strerror(errno));
  close(file);
}

// Bytes from one tensor to another, or a fill of 7, as torch would if `is_torch`.
void blit(const Tensor& from, const Tensor& to, at::IntArrayRef range, bool is_torch, bool ends) {
  in_plain_block(^{
    auto torch = std::make_unique<simulator::AsTorch>();
    const id<MTLBlitCommandEncoder> encoder = [stream()->commandBuffer() blitCommandEncoder];
    if (!is_torch) torch.reset();
    if (range.size() == 3) {
      [encoder copyFromBuffer:buffer(from)
                 sourceOffset:range[0]
                     toBuffer:buffer(to)
            destinationOffset:range[1]
                         size:range[2]];
    } else {
      [encoder fillBuffer:buffer(to) range:NSMakeRange(range[0], range[1]) value:7];
    }
    if (ends) [encoder endEncoding];
  });
}

void note(const std::string& name) {
  const std::lock_guard<std::mutex> lock(completed_mutex);
  completed.push_back(name);
}

// x + x into `middle` by a buffer that is enqueued first and committed last, and 2 of it into `out` by
// another.
void own_buffers(const Tensor& x, const Tensor& middle, const Tensor& out) {
  const simulator::AsTorch torch;
  const auto encode = [](Buffer buffer, const Tensor& from, const Tensor& into, const char* name) {
    const Encoder encoder = [buffer computeCommandEncoder];
    bind_axpy(encoder, from, from, into, 1);
    [encoder dispatchThreads:MTLSizeMake(from.numel(), 1, 1) threadsPerThreadgroup:MTLSizeMake(50, 1, 1)];
    [encoder endEncoding];
    [buffer addScheduledHandler:^(Buffer) {
      note(c10::str(name, " begins"));
    }];
    [buffer addCompletedHandler:^(Buffer done) {
      note(c10::str(name, " ends: ", static_cast<unsigned long>([done status])));
    }];
  };
  Buffer second = nil;
  @autoreleasepool {
    const id<MTLCommandQueue> queue = [device() newCommandQueue];
    const Buffer first = [queue commandBuffer];
    second = [[queue commandBuffer] retain];
    [queue release];
    [first enqueue];
    encode(second, middle, out, "second");
    [second commit];
    TORCH_CHECK([first status] == MTLCommandBufferStatusEnqueued);
    TORCH_CHECK([second status] == MTLCommandBufferStatusCommitted);
    encode(first, x, middle, "first");
    [first commit];
  }
  [second waitUntilCompleted];
  TORCH_CHECK([second status] == MTLCommandBufferStatusCompleted);
  [second release];
}

// What axpy of ones computes, on a queue and in memory of host code's own; raises if it takes `seconds`.
double beat(double seconds) {
  static const id<MTLCommandQueue> queue = [device() newCommandQueue];
  static const id<MTLBuffer> out = [device() newBufferWithLength:4 options:MTLResourceStorageModeShared];
  const auto is_over = std::make_shared<std::promise<void>>();
  @autoreleasepool {
    const id<MTLCommandBuffer> beaten = [queue commandBuffer];
    const Encoder encoder = [beaten computeCommandEncoder];
    const float one = 1;
    [encoder setComputePipelineState:kernel("axpy")];
    [encoder setBytes:&one length:4 atIndex:0];
    [encoder setBytes:&one length:4 atIndex:1];
    [encoder setBuffer:out offset:0 atIndex:2];
    [encoder setBytes:&one length:4 atIndex:3];
    dispatch(encoder, 1, 1);
    [encoder endEncoding];
    [beaten addCompletedHandler:^(id<MTLCommandBuffer>) {
      is_over->set_value();
    }];
    [beaten commit];
  }
  const auto found = is_over->get_future().wait_for(std::chrono::duration<double>(seconds));
  TORCH_CHECK(found == std::future_status::ready, "the queue has not gone on");
  return *static_cast<float*>([out contents]);
}

// A fill of memory that is released before its buffer is committed.
void release_early(bool retains) {
  with_own_buffer([retains](Buffer retaining) {
    const Buffer buffer = retains ? retaining : [own_queue() commandBufferWithUnretainedReferences];
    const id<MTLBuffer> memory = [device() newBufferWithLength:64 options:MTLResourceStorageModeShared];
    const id<MTLBlitCommandEncoder> encoder = [buffer blitCommandEncoder];
    [encoder fillBuffer:memory range:NSMakeRange(0, 64) value:1];
    [encoder endEncoding];
    [memory release];
    [buffer commit];
    [buffer waitUntilCompleted];
  });
}

// Sizes and places in a heap of 2,560 bytes: of two buffers, of all of it once one was released, of a third
// and of one that has no room.
std::vector<int64_t> heap(bool is_placed, int64_t place) {
  const simulator::AsTorch torch;
  MTLHeapDescriptor* descriptor = [MTLHeapDescriptor new];
  TORCH_CHECK(descriptor.storageMode == MTLStorageModePrivate);
  descriptor.size = 2560;
  descriptor.type = is_placed ? MTLHeapTypePlacement : MTLHeapTypeAutomatic;
  const id<MTLHeap> made = [device() newHeapWithDescriptor:descriptor];
  [descriptor release];
  const auto next = [&](NSUInteger length, NSUInteger offset) {
    return is_placed ? [made newBufferWithLength:length options:MTLResourceStorageModeShared offset:offset]
                     : [made newBufferWithLength:length options:MTLResourceStorageModeShared];
  };
  const id<MTLBuffer> first = next(1000, 0), second = next(1024, 1024);
  std::vector<int64_t> seen = {static_cast<int64_t>([second heapOffset]),
                               static_cast<int64_t>([made usedSize])};
  TORCH_CHECK([first heap] == made && [first contents] == nullptr);
  [first release];
  seen.push_back([made maxAvailableSizeWithAlignment:256]);
  const id<MTLBuffer> third = next(500, place);
  seen.push_back([third heapOffset]);
  if (!is_placed) seen.push_back(next(1024, 0) != nil);
  [third release];
  [second release];
  [made release];
  return seen;
}

// Adds "NAME" to what `seen` gives once the value is reached.
void listen(int64_t value, const std::string& name) {
  static MTLSharedEventListener* const listener = [MTLSharedEventListener new];
  const std::string* kept = new std::string(name);
  [event() notifyListener:listener
                  atValue:value
                    block:^(id<MTLSharedEvent>, uint64_t) {
                      const std::lock_guard<std::mutex> lock(completed_mutex);
                      completed.push_back(*kept);
                      delete kept;
                    }];
}

TORCH_LIBRARY(simulator_test, m) {
  m.def("set_shader(str source) -> ()", set_shader);
  m.def("axpy(Tensor x, Tensor y, float alpha) -> Tensor", axpy);
  m.def("axpy_into(Tensor x, Tensor y, float alpha, Tensor(a!) out) -> ()", axpy_into);
  m.def("indirect(Tensor groups) -> Tensor", indirect);
  m.def("commit() -> ()", commit);
  m.def("watch(str name) -> ()", watch);
  m.def("seen() -> str[]", seen);
  m.def("fault(str name, Tensor x) -> ()", commit_fault);
  m.def("signal_by_gpu(int value) -> ()", signal_by_gpu);
  m.def("wait_by_gpu(int value) -> ()", wait_by_gpu);
  m.def("signal_by_host(int value) -> ()", signal_by_host);
  m.def("signalled() -> int", signalled);
  m.def("wait_by_host(int value, int milliseconds) -> bool", wait_by_host);
  m.def("first_of(Tensor x) -> float", first_of);
  m.def("contents(Tensor x) -> int", contents);
  m.def("blit(Tensor source, Tensor out, int[] range, bool is_torch, bool ends) -> ()", blit);
  m.def("own_buffers(Tensor x, Tensor(a!) middle, Tensor(b!) out) -> ()", own_buffers);
  m.def("beat(float seconds) -> float", beat);
  m.def("release_early(bool retains) -> ()", release_early);
  m.def("heap(bool is_placed, int place) -> int[]", heap);
  m.def("read_file(str path, Tensor x, int first, int size) -> ()", read_file);
  m.def("listen(int value, str name) -> ()", listen);
  m.def("no_kernel(Tensor x) -> Tensor");
}

}  // namespace
