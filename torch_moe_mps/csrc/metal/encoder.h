// The only place that talks to a Metal command encoder. An operator lists its dispatches, then encodes them
// together:
//
//   Commands commands;
//   commands.add({"norms", dtype}, "norm_add")
//       .bind(residual, weight).params(params).threadgroups({rows}, {threads});
//   commands.encode();
//
// Arguments take the buffer indices 0, 1, 2, ... in the order of the calls.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstring>
#include <list>
#include <optional>
#include <type_traits>
#include <utility>

#include "faults.h"
#include "library.h"

namespace moe_mps {

using OptionalTensor = std::optional<at::Tensor>;

struct Size {
  int64_t x;
  int64_t y = 1;
  int64_t z = 1;
};

class Command {
 public:
  explicit Command(const Pipeline& pipeline) : pipeline_(&pipeline) {}

  // The tensors must be contiguous and not empty, and must live until Commands::encode returns: they have
  // names.
  template <class... Tensors>
  Command& bind(Tensors&&... tensors) {
    return (bind_from(contiguous(given(std::forward<Tensors>(tensors))), 0), ...);
  }
  // The same for tensors whose strides the kernel is told.
  template <class... Tensors>
  Command& bind_strided(Tensors&&... tensors) {
    return (bind_from(given(std::forward<Tensors>(tensors)), 0), ...);
  }
  // The same for a tensor from an element on.
  Command& bind_from(const at::Tensor& tensor, int64_t element);
  // Filler for arguments that are absent; the kernel is told by its params not to read it.
  Command& stand_in(const at::Tensor& tensor) {
    stand_in_ = &tensor;
    return *this;
  }

  template <class Params>
  Command& params(const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= kMaxParams);
    std::memcpy(params_.data(), &params, sizeof(Params));
    params_size_ = sizeof(Params);
    params_index_ = buffers_.size();
    return *this;
  }

  // Work of the dispatch, where the bytes of what it binds do not say it: see work.h.
  Command& work(double issue_cycles, double bytes) {
    issue_cycles_ = issue_cycles;
    bytes_ = bytes;
    return *this;
  }

  // Bytes for [[threadgroup(0)]].
  Command& threadgroup_memory(NSUInteger bytes) {
    threadgroup_bytes_ = (bytes + 15) & ~NSUInteger(15);  // Metal wants multiples of 16
    return *this;
  }

  void threadgroups(Size grid, Size threads) {
    grid_ = grid;
    set_threads(threads);
  }
  // The grid is three uint32 in `arguments`, from element `offset`, computed by an earlier dispatch.
  void indirect(const at::Tensor& arguments, int64_t offset, Size threads);

 private:
  friend class Commands;
  static constexpr size_t kMaxParams = 680;

  const at::Tensor& given(const at::Tensor& tensor) const { return tensor; }
  const at::Tensor& given(at::Tensor&& tensor) const = delete;
  const at::Tensor& given(const OptionalTensor& tensor) const;
  const at::Tensor& contiguous(const at::Tensor& tensor) const;
  // The limits of a pipeline depend on the compiler. A dispatch beyond them would neither run nor fail.
  void set_threads(Size threads);
  void encode(id<MTLComputeCommandEncoder> encoder) const;
  Launch launch() const;
  // The launch, with its threadgroup memory.
  std::string text() const;
  // The buffers from `first` up to `last`, to the indices from first + shift.
  void encode_buffers(id<MTLComputeCommandEncoder> encoder, size_t first, size_t last, size_t shift) const;

  const Pipeline* pipeline_;
  const at::Tensor* stand_in_ = nullptr;
  c10::SmallVector<id<MTLBuffer>, 16> buffers_;
  c10::SmallVector<NSUInteger, 16> offsets_;
  std::array<char, kMaxParams> params_;
  NSUInteger params_size_ = 0;
  size_t params_index_ = 0;  // buffers in front of them
  NSUInteger threadgroup_bytes_ = 0;
  Size grid_{0};
  Size threads_{0};
  double issue_cycles_ = 0, bytes_ = 0;
  id<MTLBuffer> indirect_buffer_ = nil;
  NSUInteger indirect_offset_ = 0;
};

// After how many dispatches the stream is committed; 0: never, below 0: by what they take. Torch commits only
// when somebody waits, so the GPU would not start until the host has encoded a whole step.
void commit_every(int64_t dispatches);

// Dispatches that this process has encoded.
int64_t encoded_dispatches();

class Commands {
 public:
  // The kernel `function` of a library. The reference is good until the next add().
  Command& add(const Library& library, std::string_view function);
  // The same with a stand-in.
  Command& add(const Library& library, std::string_view function, const at::Tensor& stand_in) {
    return add(library, function).stand_in(stand_in);
  }
  // A tensor that one dispatch hands to a later one; it lives as long as the list.
  const at::Tensor& keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }
  // Encodes everything on the current stream, in order, without waiting. Torch's encoder is
  // serial (so in 2.13 to 2.15): each dispatch sees what those before it wrote. With a concurrent encoder
  // (pytorch#189785) dispatches that depend on each other would need barriers between them, here.
  void encode();

 private:
  c10::SmallVector<Command, 2> commands_;
  std::list<at::Tensor> kept_;
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace moe_mps
