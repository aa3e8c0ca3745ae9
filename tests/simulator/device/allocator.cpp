// Memory of the simulated device for PyTorch: allocator, guard, hooks, random generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "../metal/runtime.h"
#include "device.h"
#include "generator.h"
#include "torch_memory.h"

namespace simulator {
namespace {

void free_buffer(void* buffer) {
  if (!torch_memory::give_back(buffer)) buffer_release(buffer);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kMps};
    void* pooled = torch_memory::allocate(bytes);
    void* buffer = pooled == nullptr ? buffer_new(bytes) : pooled;
    return {buffer, buffer, &free_buffer, kMps};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_buffer; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    synchronize();
    memcpy(buffer_contents(destination), buffer_contents(source), bytes);
  }
};
Allocator the_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::MPS, &the_allocator)

// There is one stream, and an event is the time of its recording: everything before it has run once it is
// waited for.
class Events {
 public:
  uint32_t acquire() {
    std::lock_guard<std::mutex> lock(mutex_);
    times_[++last_] = Clock::now();
    return last_;
  }
  void release(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    times_.erase(id);
  }
  void record(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    times_[id] = Clock::now();
    told_.erase(id);
  }
  // Of an event's end the host is told once: by a wait for it, unless the GPU was there before, or by this
  // call.
  void tell(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    told_.insert(id);
  }
  double milliseconds(uint32_t start, uint32_t end) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!told_.insert(end).second) {
      lock.unlock();
      fail(
          "elapsed_time: the host has waited for the end event before, by synchronize() or elapsed_time(), "
          "and "
          "waits for it again: on macOS that may last forever; wait with torch.mps.synchronize() instead");
    }
    return std::chrono::duration<double, std::milli>(times_.at(end) - times_.at(start)).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  std::map<uint32_t, Clock::time_point> times_;
  std::set<uint32_t> told_;
  uint32_t last_ = 0;
};
Events& events() {
  static Events* instance = new Events;
  return *instance;
}
uint32_t event_id(void* event) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(event));
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::DeviceType::MPS; }
  c10::Device exchangeDevice(c10::Device) const override { return kMps; }
  c10::Device getDevice() const override { return kMps; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(static_cast<uintptr_t>(events().acquire()));
    events().record(event_id(*event));
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return !has_pending(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    events().release(event_id(event));
  }
  bool queryStream(const c10::Stream&) const override { return !has_pending(); }
  void synchronizeStream(const c10::Stream&) const override { synchronize_host(); }
  void synchronizeEvent(void* event) const override {
    synchronize_host();
    events().tell(event_id(event));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_host(); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return events().milliseconds(event_id(start), event_id(end));
  }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kMps); }
};
C10_REGISTER_GUARD_IMPL(MPS, Guard)

}  // namespace

c10::Allocator* allocator() {
  return &the_allocator;
}

class Hooks final : public at::MPSHooksInterface {
 public:
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    return major < 15 || (major == 15 && minor <= 2);
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  at::Allocator* getMPSDeviceAllocator() const override { return &the_allocator; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize() const override { synchronize_host(); }
  void commitStream() const override { commit_in_queue(); }
  void* getCommandBuffer() const override { return stream_command_buffer(); }
  void* getDispatchQueue() const override { return stream_queue(); }
  void emptyCache() const override {
    synchronize_host();
    torch_memory::release_free();
  }
  size_t getCurrentAllocatedMemory() const override {
    return live_bytes() - torch_memory::current_bytes().free;
  }
  size_t getDriverAllocatedMemory() const override {
    const torch_memory::Bytes bytes = torch_memory::current_bytes();
    return live_bytes() - bytes.in_use - bytes.free + bytes.heaps;
  }
  size_t getRecommendedMaxMemory() const override { return recommended_bytes(); }
  size_t getMaxBufferLength() const override { return recommended_bytes(); }
  uint32_t acquireEvent(bool) const override { return events().acquire(); }
  void releaseEvent(uint32_t id) const override { events().release(id); }
  void recordEvent(uint32_t id) const override { events().record(id); }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t id) const override {
    synchronize_host();
    events().tell(id);
  }
  bool queryEvent(uint32_t) const override { return !has_pending(); }
  double elapsedTimeOfEvents(uint32_t start, uint32_t end) const override {
    return events().milliseconds(start, end);
  }
  c10::Device getDeviceFromPtr(void*) const override { return kMps; }
};

namespace {

// Torch has one kind of accelerator, and its build for Linux on PyPI is for CUDA: it becomes one without.
const bool without_cuda = [] {
  auto* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  hooks->~CUDAHooksInterface();
  new (hooks) at::CUDAHooksInterface;
  return true;
}();

}  // namespace
}  // namespace simulator

namespace at {
using simulator::Hooks;
C10_REGISTER_TYPED_CLASS(MPSHooksRegistry, "MPSHooks", Hooks)
}  // namespace at
