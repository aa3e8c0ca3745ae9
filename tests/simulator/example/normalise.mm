// An extension of PyTorch with a Metal kernel, as torch.utils.cpp_extension.load builds it on a Mac.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/mps.h>

#include <string>

static id<MTLBuffer> buffer_of(const at::Tensor& t) {
  return __builtin_bit_cast(id<MTLBuffer>, t.storage().data());
}

at::Tensor normalise(const at::Tensor& x, const std::string& source) {
  TORCH_CHECK(x.is_mps() && x.is_contiguous() && x.dim() == 2 && x.size(1) <= 128,
              "normalise: x must be contiguous, [rows, width] with at most 128 columns, on mps");
  at::Tensor out = at::empty_like(x);
  const uint32_t width = uint32_t(x.size(1));
  @autoreleasepool {
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    NSError* error = nil;
    NSString* text = [NSString stringWithUTF8String:source.c_str()];
    id<MTLLibrary> library = [device newLibraryWithSource:text options:nil error:&error];
    TORCH_CHECK(library, "normalise: ", [[error localizedDescription] UTF8String]);
    id<MTLFunction> function = [library newFunctionWithName:@"normalise"];
    id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:function error:&error];
    TORCH_CHECK(pipeline, "normalise: ", [[error localizedDescription] UTF8String]);
    id<MTLCommandBuffer> commands = torch::mps::get_command_buffer();
    dispatch_sync(torch::mps::get_dispatch_queue(), ^{
      id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
      [encoder setComputePipelineState:pipeline];
      [encoder setBuffer:buffer_of(x) offset:x.storage_offset() * 4 atIndex:0];
      [encoder setBuffer:buffer_of(out) offset:0 atIndex:1];
      [encoder setBytes:&width length:sizeof width atIndex:2];
      [encoder dispatchThreadgroups:MTLSizeMake(x.size(0), 1, 1)
              threadsPerThreadgroup:MTLSizeMake(128, 1, 1)];
      [encoder endEncoding];
      torch::mps::commit();
    });
  }
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("normalise", &normalise);
}
