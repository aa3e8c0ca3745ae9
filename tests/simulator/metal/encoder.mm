// Encoders, of which a command buffer has one at a time, from its beginning to endEncoding. That of torch's
// stream is valid in one dispatch_sync block only.
#import <Metal/Metal.h>

#include <cstring>
#include <string>

#include "dispatch.h"
#include "foundation.h"
#include "metal.h"
#include "runtime.h"

using simulator::Command;
using simulator::fail;
using simulator::GridKind;

@interface SimulatorAnyEncoder : NSObject {
 @public
  std::shared_ptr<simulator::Encoding>* encoding;
  bool is_over;
}
- (void)endEncoding;
@end
@implementation SimulatorAnyEncoder
- (void)dealloc {
  if (!is_over) {
    simulator::report("Command encoder released without endEncoding");
    (*encoding)->encoder = nullptr;
  }
  delete encoding;
  [super dealloc];
}
- (void)use:(const char*)method {
  if (is_over) fail(std::string(method) + ": the encoder has ended");
}
- (void)endEncoding {
  [self use:"endEncoding"];
  is_over = true;
  (*encoding)->encoder = nullptr;
}
@end

@interface SimulatorEncoder : SimulatorAnyEncoder <MTLComputeCommandEncoder> {
 @public
  Command* command;  // what is set so far
  uint64_t block;    // for which torch's stream has given it out; 0 for one of host code's own
}
@end

namespace {

std::array<size_t, 3> to_array(MTLSize size) {
  return {size.width, size.height, size.depth};
}

void check_index(const char* method, NSUInteger index) {
  if (index >= simulator::kMaxBindings) {
    fail(std::string(method) + ": index " + std::to_string(index) + " is over the last one, " +
         std::to_string(simulator::kMaxBindings - 1));
  }
}

simulator::Binding bind(const char* method, id<MTLBuffer> buffer, NSUInteger offset, NSUInteger bytes) {
  simulator::Binding binding;
  binding.memory = simulator::buffer_memory((void*)buffer);
  binding.offset = offset;
  if (!binding.memory) {
    fail(std::string(method) +
         ": the argument is no live MTLBuffer (a tensor of another device, or freed memory)");
  }
  if (offset + bytes > binding.memory->size) {
    fail(std::string(method) + ": offset " + std::to_string(offset) + " is out of range, the buffer has " +
         std::to_string(binding.memory->size) + " bytes");
  }
  return binding;
}

}  // namespace

@implementation SimulatorEncoder
- (void)dealloc {
  delete command;
  [super dealloc];
}
- (Command&)set:(const char*)method {
  if (block != 0 && (is_over || simulator::current_block() != block)) {
    fail(std::string(method) +
         ": the encoder is used outside the dispatch_sync block in which it was taken, or after a commit; "
         "call stream->commandEncoder() in each block");
  }
  [self use:method];
  return *command;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  Command& c = [self set:"setComputePipelineState"];
  if (!state) fail("setComputePipelineState: the pipeline is nil");
  c.kernel = ((SimulatorPipeline*)state)->kernel;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Command& c = [self set:"setBuffer"];
  check_index("setBuffer", index);
  c.buffers[index] = buffer ? bind("setBuffer", buffer, offset, 1) : simulator::Binding();
  const auto& memory = c.buffers[index].memory;
  const bool is_hosts = (*encoding)->open && (*encoding)->open->is_hosts;
  if (memory && memory->is_hosts != is_hosts && simulator::is_strict())
    fail(
        "setBuffer: nothing orders torch's streams and a queue of host code's own, and both use this buffer");
}
- (void)setBuffers:(const id<MTLBuffer>[])buffers
           offsets:(const NSUInteger[])offsets
         withRange:(NSRange)range {
  if (simulator::forgetting()) return;
  for (NSUInteger i = 0; i < range.length; i++)
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  if (simulator::forgetting()) return;
  Command& c = [self set:"setBytes"];
  check_index("setBytes", index);
  if (length == 0 || length > simulator::kMaxSetBytes) {
    fail("setBytes: length " + std::to_string(length) + " at index " + std::to_string(index) +
         " is not in 1.." + std::to_string(simulator::kMaxSetBytes));
  }
  c.buffers[index] = simulator::Binding();
  c.buffers[index].bytes = std::make_shared<std::string>(static_cast<const char*>(bytes), length);
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  Command& c = [self set:"setThreadgroupMemoryLength"];
  check_index("setThreadgroupMemoryLength", index);
  if (length % 16 != 0) {
    fail("setThreadgroupMemoryLength: " + std::to_string(length) + " at index " + std::to_string(index) +
         " is no multiple of 16");
  }
  if (length > simulator::kMaxThreadgroupMemory) {
    fail("setThreadgroupMemoryLength: " + std::to_string(length) + " bytes at index " +
         std::to_string(index) + " are over the limit of " +
         std::to_string(simulator::kMaxThreadgroupMemory));
  }
  c.threadgroup_bytes[index] = length;
}
- (void)dispatch:(GridKind)kind grid:(MTLSize)grid threads:(MTLSize)threads method:(const char*)method {
  Command& c = [self set:method];
  if (!c.kernel) fail(std::string(method) + ": no pipeline is set in this block");
  c.kind = kind;
  c.grid = to_array(grid);
  c.threads = to_array(threads);
  try {
    simulator::record(c, **encoding);
  } catch (...) {
    c.threadgroup_bytes = {};
    throw;
  }
}
- (void)dispatchThreads:(MTLSize)threadsPerGrid threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup {
  [self dispatch:GridKind::kThreads
            grid:threadsPerGrid
         threads:threadsPerThreadgroup
          method:"dispatchThreads"];
}
- (void)dispatchThreadgroups:(MTLSize)threadgroupsPerGrid
       threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup {
  [self dispatch:GridKind::kThreadgroups
            grid:threadgroupsPerGrid
         threads:threadsPerThreadgroup
          method:"dispatchThreadgroups"];
}
- (void)dispatchThreadgroupsWithIndirectBuffer:(id<MTLBuffer>)indirectBuffer
                          indirectBufferOffset:(NSUInteger)indirectBufferOffset
                         threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup {
  const char* method = "dispatchThreadgroupsWithIndirectBuffer";
  Command& c = [self set:method];
  if (indirectBufferOffset % 4 != 0) {
    fail(std::string(method) + ": offset " + std::to_string(indirectBufferOffset) + " is no multiple of 4");
  }
  c.indirect =
      bind(method, indirectBuffer, indirectBufferOffset, sizeof(MTLDispatchThreadgroupsIndirectArguments));
  [self dispatch:GridKind::kIndirect grid:MTLSizeMake(0, 0, 0) threads:threadsPerThreadgroup method:method];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self set:"memoryBarrierWithScope"];
  simulator::record_barrier();
}
- (void)endEncoding {
  if (block != 0 && simulator::is_strict())
    fail("endEncoding: the encoder belongs to PyTorch's stream, which ends it");
  [super endEncoding];
}
@end

namespace {

// That which torch's stream has given out; nil where there is none.
SimulatorEncoder* streams_encoder(const simulator::Encoding& encoding) {
  const id open = (id)encoding.encoder;
  if (!open || [open class] != [SimulatorEncoder class]) return nil;
  auto* encoder = (SimulatorEncoder*)open;
  return encoder->block == 0 ? nil : encoder;
}

// It is kept as an empty shell, so that using it later is a finding and not a crash.
void end(SimulatorEncoder* encoder) {
  encoder->is_over = true;
  (*encoder->encoding)->encoder = nullptr;
  delete encoder->command;
  delete encoder->encoding;
}

template <typename Encoder>
Encoder* begin(const char* method, const std::shared_ptr<simulator::Encoding>& encoding) {
  if (encoding->encoder)
    fail(std::string(method) + ": A command encoder is already encoding to this command buffer");
  Encoder* made = [Encoder new];
  made->encoding = new std::shared_ptr<simulator::Encoding>(encoding);
  encoding->encoder = (void*)made;
  return made;
}

}  // namespace

namespace simulator {
void end_encoder(Encoding& encoding) {
  if (SimulatorEncoder* encoder = streams_encoder(encoding)) end(encoder);
}
void check_encoder(const Encoding& encoding) {
  if (encoding.encoder) fail("commit: commit command buffer with uncommitted encoder");
}
size_t threadgroup_bytes_set() {
  size_t set = 0;
  if (SimulatorEncoder* encoder = streams_encoder(*encoding_of(current_stream())))
    for (size_t bytes : encoder->command->threadgroup_bytes) set += bytes;
  return set;
}
}  // namespace simulator

id<MTLComputeCommandEncoder> simulated_encoder(simulator::StreamNumber stream) {
  const uint64_t block = simulator::current_block();
  if (block == 0) {
    fail("commandEncoder() is called outside of a dispatch_sync block; encode inside "
         "at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{ ... })");
  }
  const std::shared_ptr<simulator::Encoding> encoding = simulator::encoding_of(stream);
  SimulatorEncoder* current = streams_encoder(*encoding);
  if (current && simulator::forgetting()) current->block = block;
  if (current && current->block == block) return current;
  // PyTorch's encoder goes on until a commit. Bindings of another block are nobody's to use; lengths of
  // threadgroup memory stay.
  const auto lengths = current ? current->command->threadgroup_bytes : decltype(Command::threadgroup_bytes){};
  if (current) end(current);
  current = begin<SimulatorEncoder>("commandEncoder()", encoding);
  simulator::keep_for_the_process(current);
  current->command = new Command;
  current->command->threadgroup_bytes = lengths;
  current->block = block;
  return current;
}

id<MTLComputeCommandEncoder> simulated_compute_encoder(const std::shared_ptr<simulator::Encoding>& encoding) {
  SimulatorEncoder* made = begin<SimulatorEncoder>("computeCommandEncoder", encoding);
  made->command = new Command;
  return [made autorelease];
}

// It copies what lies in memory when its turn comes.
@interface SimulatorBlitEncoder : SimulatorAnyEncoder <MTLBlitCommandEncoder>
@end
@implementation SimulatorBlitEncoder
- (void)check:(const char*)method multiple:(NSUInteger)value {
  if (value % 4 != 0 && !simulator::AsTorch::is_there())
    fail(std::string(method) + ": offsets and sizes must be multiples of 4, got " + std::to_string(value));
}
- (void)copyFromBuffer:(id<MTLBuffer>)sourceBuffer
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destinationBuffer
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  const char* method = "copyFromBuffer";
  [self use:method];
  for (NSUInteger value : {sourceOffset, destinationOffset, size}) [self check:method multiple:value];
  const simulator::Binding from = bind(method, sourceBuffer, sourceOffset, size);
  const simulator::Binding to = bind(method, destinationBuffer, destinationOffset, size);
  const auto act = [from, to, size] {
    memmove(to.memory->data + to.offset, from.memory->data + from.offset, size);
  };
  simulator::record_blit("copyFromBuffer", from, to, act, **encoding);
}
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  const char* method = "fillBuffer";
  [self use:method];
  for (NSUInteger each : {range.location, range.length}) [self check:method multiple:each];
  const simulator::Binding to = bind(method, buffer, range.location, range.length);
  const auto act = [to, size = range.length, value] { memset(to.memory->data + to.offset, value, size); };
  simulator::record_blit("fillBuffer", {}, to, act, **encoding);
}
@end

id<MTLBlitCommandEncoder> simulated_blit_encoder(const std::shared_ptr<simulator::Encoding>& encoding) {
  return [begin<SimulatorBlitEncoder>("blitCommandEncoder", encoding) autorelease];
}
