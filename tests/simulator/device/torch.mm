#include "torch.h"

#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "../metal/metal.h"
#include "device.h"

namespace simulator {
namespace {

using at::Tensor;

void fill_with_nan(char* data, size_t bytes) {
  constexpr uint16_t kNan = 0x7fe5;  // in float32, float16 and bfloat16
  for (size_t i = 0; i < bytes; ++i) data[i] = reinterpret_cast<const char*>(&kNan)[i % sizeof(kNan)];
}

// Gives a storage pages of its own, which it keeps. Where the tensor is not all of it, or the memory is
// another library's, its bytes are only filled.
std::unique_ptr<Poison> poison(const Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const bool is_whole = tensor.nbytes() == storage->nbytes() && tensor.storage_offset() == 0;
  if (!is_whole || !storage->resizable()) {
    fill_with_nan(static_cast<char*>(tensor.data_ptr()), tensor.nbytes());
    return nullptr;
  }
  const size_t page = sysconf(_SC_PAGESIZE), size = (tensor.nbytes() + page - 1) / page * page;
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "simulator: no memory for a copy of ", size, " bytes");
  struct Owner {
    void* pages;
    size_t size;
    c10::DataPtr before;  // NumPy may look at it
  };
  const auto release = [](void* owner) {
    auto* owned = static_cast<Owner*>(owner);
    munmap(owned->pages, owned->size);
    delete owned;
  };
  auto* owner = new Owner{pages, size, {}};
  owner->before = storage->set_data_ptr(c10::DataPtr(pages, owner, release, at::kCPU));
  fill_with_nan(static_cast<char*>(pages), size);
  auto made = std::make_unique<Poison>(static_cast<char*>(pages), size);
  made->line = python_line();
  made->close();
  return made;
}

void say_if_read(Poison& poison) {
  if (!poison.was_read()) return;
  report(
      poison.line +
      ": a copy to the CPU that does not block is read before the GPU has written it; wait for its command "
      "buffer first, and copy from the strides of the destination: torch reads a temporary at once where "
      "they differ");
}

// Elements in a row of memory, as many as a tensor has.
Tensor flat(const Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1});
}

std::shared_ptr<Use> use_by_copy(const Tensor& tensor, bool writes) {
  const size_t offset = tensor.storage_offset() * tensor.itemsize();
  return use_of("copy_", {{buffer_memory(tensor.storage().data()), offset, writes}});
}

// The GPU reads the host's pages at the command's turn. `check` is called once it has.
void blit_from_host(const Tensor& source, const Tensor& destination, const std::function<void()>& check_) {
  const AsTorch as_torch;
  const std::function<void()> check = check_;  // a block keeps no reference
  const auto first = reinterpret_cast<uintptr_t>(source.const_data_ptr()), page = first / kPage * kPage;
  const size_t offset = first - page, pages = (offset + source.nbytes() + kPage - 1) / kPage * kPage;
  @autoreleasepool {
    const id<MTLBuffer> from = [simulated_device() newBufferWithBytesNoCopy:reinterpret_cast<void*>(page)
                                                                     length:pages
                                                                    options:MTLResourceStorageModeShared
                                                                deallocator:^(void*, NSUInteger) {
                                                                  check();
                                                                }];
    const id<MTLBlitCommandEncoder> encoder =
        [at::mps::getCurrentMPSStream()->commandBuffer() blitCommandEncoder];
    [encoder copyFromBuffer:from
               sourceOffset:offset
                   toBuffer:(id<MTLBuffer>)destination.storage().data()
          destinationOffset:destination.storage_offset() * destination.itemsize()
                       size:source.nbytes()];
    [encoder endEncoding];
    [from release];
  }
}

// A blit: the GPU reads the source at the command's turn, and the host sees the result once the buffer is
// complete.
std::shared_ptr<Poison> blit(const Tensor& source, const Tensor& destination) {
  end_encoder();
  const std::shared_ptr<Poison> poisoned_memory = poison(destination);
  const c10::Storage storage = destination.storage();
  const size_t offset = destination.storage_offset() * destination.itemsize();
  const auto made = std::make_shared<Tensor>();
  const auto act = [made, from = flat(host_view(source)), dtype = destination.scalar_type()] {
    *made = from.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  };
  const auto appear = [made, storage, offset, poisoned_memory] {
    if (poisoned_memory) {
      poisoned_memory->open();
      say_if_read(*poisoned_memory);
    }
    if (!made->defined()) return;  // the buffer has failed
    memcpy(static_cast<char*>(storage.mutable_data()) + offset, made->data_ptr(), made->nbytes());
  };
  record_copy(act, appear, use_by_copy(source, false), current_stream());
  return poisoned_memory;
}

// Whether a tensor has all elements of the memory that it spans.
bool is_dense(const Tensor& tensor) {
  int64_t spanned = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) spanned += (tensor.size(i) - 1) * tensor.stride(i);
  return spanned == tensor.numel();
}

struct Stored {
  std::mutex mutex;
  struct Error {
    bool is_out_of_memory;
    std::string message;
  };
  std::map<StreamNumber, std::optional<Error>> errors;
};
Stored& stored() {
  static Stored& instance = *new Stored;
  return instance;
}

}  // namespace

namespace {
std::atomic<int>& simulated_minor() {
  static const char* wanted = std::getenv("SIMULATED_TORCH");
  static std::atomic<int> minor = wanted == nullptr ? 15 : std::atoi(wanted + std::strlen("2."));
  return minor;
}
}  // namespace

int torch_minor() {
  return simulated_minor();
}

namespace {
std::map<std::pair<int, std::string>, Aten>& table() {
  static auto& rows = *new std::map<std::pair<int, std::string>, Aten>;
  return rows;
}

struct Called {
  std::mutex mutex;
  std::set<std::string> names;
  std::string text;
};
Called& called() {
  static Called& instance = *new Called;
  return instance;
}
}  // namespace

Aten aten(const std::string& name, const std::string& overload) {
  const std::string full_name = overload.empty() ? name : name + "." + overload;
  {
    const std::lock_guard<std::mutex> lock(called().mutex);
    called().names.insert(full_name);
  }
  const auto found = table().find({torch_minor(), full_name});
  return found == table().end() ? Aten() : found->second;
}

void check_alignment(const Tensor& destination) {
  TORCH_INTERNAL_ASSERT(reinterpret_cast<uintptr_t>(destination.const_data_ptr()) % 4 == 0,
                        "Unaligned blit request");
}

void copy_without_waiting(const Tensor& source, const Tensor& destination) {
  const Tensor from = source.expand_as(destination);
  const bool has_bits = from.is_conj() != destination.is_conj() || from.is_neg() != destination.is_neg();
  const bool has_holes = torch_minor() >= 14 && !is_dense(from);
  if (from.strides() == destination.strides() && !has_holes && !has_bits) {
    blit(from, destination);
    commit_in_queue();
    return;
  }
  const Tensor temporary = at::empty(destination.sizes(), destination.options());
  const Tensor gathered = at::empty(from.sizes(), from.options()).copy_(from);
  const std::shared_ptr<Poison> poisoned_memory = blit(gathered, temporary);
  destination.copy_(temporary);  // in the order of a GPU that is never so quick
  commit_in_queue();
  say_if_read(*poisoned_memory);
  const std::string reports = take_reports();
  if (!reports.empty()) fail(reports);
}

void copy_to_mps_without_waiting(const Tensor& source, const Tensor& destination) {
  const bool is_itself = source.scalar_type() == destination.scalar_type() && source.is_contiguous() &&
                         source.sizes() == destination.sizes();
  const Tensor read = is_itself ? source : source.to(destination.scalar_type(), false, true).contiguous();
  const auto bytes = [read] {
    return std::string(static_cast<const char*>(read.const_data_ptr()), read.nbytes());
  };
  const auto check = [before = bytes(), bytes, line = python_line()] {
    if (bytes() == before) return;
    report(
        line +
        ": the source of a copy to mps that does not block is changed before the GPU has read it; wait for "
        "its command buffer first");
  };
  if (destination.is_contiguous()) {
    in_queue([&] {
      end_encoder();
      blit_from_host(read, destination, check);
    });
  } else {
    end_encoder();
    const auto act = [read, into = host_view(destination), check] {
      into.copy_(read);
      check();
    };
    record_copy(act, [] {}, use_by_copy(destination, true), current_stream());
  }
  commit_in_queue();
}

void torch_commits(CommandBuffer& buffer, StreamNumber stream, bool waits) {
  if (torch_minor() < 15) return;
  const auto store = [&buffer, stream] {
    if (buffer.failure == Failure::kNone) return;
    const std::lock_guard<std::mutex> lock(stored().mutex);
    std::optional<Stored::Error>& error = stored().errors[stream];
    if (error) return;
    const bool is_out_of_memory = buffer.failure == Failure::kOutOfMemory;
    error =
        Stored::Error{is_out_of_memory, "MPS command buffer execution failed: " + text_of(buffer.failure)};
  };
  // Behind the host's handlers; where torch waits, it looks at the buffer itself.
  (waits ? buffer.ended : buffer.completed).push_back(store);
}

void raise_stored_error(StreamNumber stream) {
  std::optional<Stored::Error> error;
  {
    const std::lock_guard<std::mutex> lock(stored().mutex);
    error.swap(stored().errors[stream]);
  }
  if (!error) return;
  const c10::SourceLocation here = {__func__, __FILE__, __LINE__};
  if (error->is_out_of_memory) throw c10::OutOfMemoryError(here, error->message);
  throw c10::AcceleratorError(here, 5, error->message);
}

}  // namespace simulator

// From here on.
extern "C" __attribute__((visibility("default"))) void simulator_use_torch(int minor) {
  simulator::simulated_minor() = minor;
}
extern "C" __attribute__((visibility("default"))) int simulator_torch(void) {
  return simulator::torch_minor();
}
extern "C" __attribute__((visibility("default"))) void simulator_add_aten(int minor, const char* name,
                                                                          int is_graph, int waits,
                                                                          size_t threadgroup_bytes) {
  simulator::table()[{minor, name}] = {is_graph != 0, waits != 0, threadgroup_bytes};
}
// The operators of aten that were called so far, a line each; forgets them. Valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* simulator_called_aten(void) {
  auto& called = simulator::called();
  const std::lock_guard<std::mutex> lock(called.mutex);
  called.text.clear();
  for (const std::string& name : called.names) called.text += name + "\n";
  called.names.clear();
  return called.text.c_str();
}
