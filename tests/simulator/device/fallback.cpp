// All other operators of aten: computed on the CPU after waiting for the device, or on the null device
// (dropped.h) not at all.
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_to_cpu.h>
#include <torch/library.h>

#include "../metal/commands.h"
#include "../metal/runtime.h"
#include "device.h"
#include "dropped.h"
#include "generator.h"
#include "torch.h"

namespace simulator {
namespace {

using torch::jit::Stack;

// Numbers of a command buffer that has failed may be of no row. torch's kernel raises nothing on a GPU, so
// the stand-in reads some row.
void read_any_row(const c10::OperatorHandle& op, Stack* stack) {
  if (op.schema().name() != "aten::index_select" || !simulator_has_failed()) return;
  const auto first = stack->end() - op.schema().arguments().size();
  const int64_t rows = first->toTensor().size((first + 1)->toInt());
  const at::Tensor numbers = at::_to_cpu({(first + 2)->toTensor()})[0];
  *(first + 2) = numbers.clamp(0, rows - 1);
}

void compute_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const StandIn stand_in;
  synchronize();
  stand_in.count();
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& type = arguments[i].real_type();
    const bool is_generator = type->str() == "Generator?" || type->str() == "Generator";
    if (!is_generator) continue;
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    at::Generator generator = value.isNone() ? default_generator() : value.toGenerator();
    if (generator.device().type() == c10::DeviceType::MPS) value = generator.get<Generator>()->cpu();
  }
  read_any_row(op, stack);
  at::native::cpu_fallback(op, stack);
}

// The kernel of torch's that a Mac would encode. Only the outermost operator is one.
// Returns: whether the host waits behind it.
bool encode(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const Aten own = aten(name, op.schema().overload_name());
  size_t left = 0;
  in_queue([&] {
    if (own.is_graph) end_encoder();
    left = threadgroup_bytes_set();
  });
  if (own.threadgroup_bytes + left > kMaxThreadgroupMemory) {
    fail(name + ": its kernel has " + std::to_string(own.threadgroup_bytes) +
         " bytes of threadgroup memory and " + std::to_string(left) +
         " that are still set in the encoder, which are over the limit of " +
         std::to_string(kMaxThreadgroupMemory));
  }
  return own.waits;
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const bool waits = !StandIn::is_there() && encode(op);
  compute_on_cpu(op, stack);
  if (waits) synchronize_host();
}

// Operators of other libraries must bring a kernel for MPS: one that is missing has to fail.
void fall_back(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  const bool is_torch = name.starts_with("aten::") || name.starts_with("prims::");
  TORCH_CHECK_NOT_IMPLEMENTED(is_torch, name, " has no MPS kernel (the simulator runs only aten on the CPU)");
  if (!dropping() || !drop(op, stack)) compute(op, stack);
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Without its MPS part libtorch asks the device for a convolution of its own, before the fallback sees one.
// It takes the arguments of the general one; the general gradient takes the shape of the bias after the
// weight, too.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const c10::OperatorHandle general = find("aten::convolution");
  fall_back(general, stack);
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  static const c10::OperatorHandle general = find("aten::convolution_backward");
  const auto first = stack->end() - op.schema().arguments().size();
  const std::vector<int64_t> of_bias = {first->toTensor().size(1)};
  stack->insert(first + 3, of_bias);
  fall_back(general, stack);
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
TORCH_LIBRARY_IMPL(_, MPS, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

}  // namespace
}  // namespace simulator
