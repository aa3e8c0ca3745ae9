#include "generator.h"

#include "device.h"

namespace simulator {

Generator::Generator(at::Generator cpu)
    : c10::GeneratorImpl(kMps, c10::DispatchKeySet(c10::DispatchKey::MPS)), cpu_(std::move(cpu)) {}

void Generator::set_state(const c10::TensorImpl& state) {
  cpu_.unsafeGetGeneratorImpl()->set_state(state);
}
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  return cpu_.unsafeGetGeneratorImpl()->get_state();
}

at::Generator new_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator());
}

const at::Generator& default_generator() {
  static const at::Generator generator = new_generator();
  return generator;
}

}  // namespace simulator
