// Random numbers of the simulated device come from a CPU generator of its own, so that torch.mps.manual_seed,
// torch.Generator("mps") and the CPU's generator do not disturb each other.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

namespace simulator {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator cpu);
  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override { return new Generator(cpu_.clone()); }
  at::Generator cpu_;
};

at::Generator new_generator();
const at::Generator& default_generator();

}  // namespace simulator
