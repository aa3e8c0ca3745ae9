#include "dropped.h"

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <ATen/WrapDimUtils.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include "device.h"

namespace simulator {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

struct Output {
  int argument;  // the tensor that it is (in place, out=), in the order of the arguments; -1 where it is new
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};
// Empty if shapes alone do not tell the outputs, so that the operator must run.
using Outputs = std::optional<std::vector<Output>>;

// --- the signature of a call: what its shapes depend on

// False for a kind of argument that it does not know.
class Signature {
 public:
  explicit Signature(const c10::OperatorHandle& op) { number(reinterpret_cast<intptr_t>(&op.schema())); }

  bool add(const IValue& value) {
    text.push_back(static_cast<char>(kind(value)));
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isInt()) return number(value.toInt());
    if (value.isBool()) return number(value.toBool());
    if (value.isDouble()) return bytes(value.toDouble());
    if (value.isList()) return each(value.toListRef());
    if (value.isString()) return list(value.toStringRef());
    return value.isNone() || value.isDevice();
  }

  std::string text;

 private:
  static int kind(const IValue& v) {
    return v.isTensor() ? 1 : v.isInt() ? 2 : v.isBool() ? 3 : v.isDouble() ? 4 : v.isNone() ? 5 : 6;
  }
  template <class T>
  bool bytes(const T& value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return true;
  }
  bool number(int64_t value) { return bytes(value); }
  template <class List>
  bool list(const List& values) {
    number(values.size());
    for (const auto& value : values) bytes(value);
    return true;
  }
  bool each(c10::ArrayRef<IValue> values) {
    number(values.size());
    return std::all_of(values.begin(), values.end(), [this](const IValue& value) { return add(value); });
  }
  bool tensor(const Tensor& t) {
    if (!t.defined()) return true;
    number(static_cast<int>(t.scalar_type()) | t.unsafeGetTensorImpl()->is_wrapped_number() << 8);
    return list(t.sizes()) && list(t.strides());
  }
};

// --- the arguments' tensors

template <class Function>
void for_each_tensor(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) for_each_tensor(item, function);
  }
}

// A wrapped Python number is kept: type promotion treats it differently from a tensor.
Tensor on_meta(const Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

IValue on_meta(const IValue& value) {
  if (value.isTensor()) return on_meta(value.toTensor());
  if (value.isDevice()) return c10::Device(c10::kMeta);
  if (value.isGenerator()) return IValue();
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorList()) list.push_back(on_meta(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional<Tensor>(on_meta(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// --- shapes, from the operator's own kernel for meta tensors

// cat.out: a cache grows with every token, so that its shape is new each time, and cat's meta kernel is
// Python.
Outputs infer_cat(c10::ArrayRef<IValue> arguments) {
  const std::vector<Tensor> tensors = arguments[0].toTensorVector();
  std::vector<int64_t> sizes;
  for (const Tensor& t : tensors) {
    if (t.dim() == 1 && t.numel() == 0) continue;  // of any rank
    const int64_t dimension = at::maybe_wrap_dim(arguments[1].toInt(), t.dim());
    if (sizes.empty())
      sizes = t.sizes().vec();
    else
      sizes[dimension] += t.size(dimension);
  }
  if (sizes.empty()) sizes = {0};
  return std::vector<Output>{{static_cast<int>(tensors.size()), sizes, {}, {}}};
}

Outputs infer(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  if (op.operator_name() == c10::OperatorName("aten::cat", "out")) return infer_cat(arguments);
  Stack stack;
  std::vector<c10::TensorImpl*> given;
  for (const IValue& argument : arguments) {
    stack.push_back(on_meta(argument));
    for_each_tensor(stack.back(), [&](const Tensor& t) { given.push_back(t.unsafeGetTensorImpl()); });
  }
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  std::vector<Output> outputs;
  for (const IValue& value : stack) {
    if (!value.isTensor() || !value.toTensor().defined()) return std::nullopt;
    const Tensor& t = value.toTensor();
    const auto same = std::find(given.begin(), given.end(), t.unsafeGetTensorImpl());
    const int argument = same == given.end() ? -1 : static_cast<int>(same - given.begin());
    outputs.push_back({argument, t.sizes().vec(), t.strides().vec(), t.scalar_type()});
  }
  return outputs;
}

const Outputs& outputs_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Outputs> known;
  static const Outputs unknown;
  Signature signature(op);
  for (const IValue& argument : arguments)
    if (!signature.add(argument)) return unknown;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(signature.text);
    if (found != known.end()) return found->second;
  }
  Outputs outputs = infer(op, arguments);
  std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(std::move(signature.text), std::move(outputs)).first->second;
}

// --- outputs

bool is_floating(const Tensor& tensor) {
  return tensor.defined() && !at::isIntegralType(tensor.scalar_type(), true);
}

// The indices of a sort differ from each other, as those of distinct experts do.
bool gives_order(const std::string& name) {
  return name == "aten::topk" || name == "aten::sort";
}

void fill_with_order(const Tensor& indices, int64_t dimension) {
  if (indices.dim() == 0) return;
  std::vector<int64_t> sizes(indices.dim(), 1);
  sizes[at::maybe_wrap_dim(dimension, indices.dim())] = -1;
  const int64_t count = indices.size(dimension);
  indices.copy_(at::arange(count, at::kLong).view(sizes));
}

int64_t dimension_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const auto index = op.schema().argumentIndexWithName("dim");
  return index ? arguments[*index].toInt() : -1;
}

Tensor make(const Output& output, const std::vector<Tensor>& given) {
  if (output.argument < 0)
    return at::detail::empty_strided_generic(output.sizes, output.strides, allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::MPS), output.dtype);
  const Tensor& tensor = given[output.argument];
  if (tensor.sizes() != output.sizes) tensor.resize_(output.sizes);
  return tensor;
}

}  // namespace

bool drop(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const c10::ArrayRef<IValue> arguments(stack->data() + stack->size() - count, count);
  std::vector<Tensor> given;
  for (const IValue& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) { given.push_back(tensor); });
  if (std::none_of(given.begin(), given.end(), is_floating)) return false;
  const Outputs& outputs = outputs_of(op, arguments);
  if (!outputs) return false;
  Stack results;
  for (const Output& output : *outputs) results.push_back(make(output, given));
  if (gives_order(op.schema().name()))
    fill_with_order(results.back().toTensor(), dimension_of(op, arguments));
  stack->resize(stack->size() - count);
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}

}  // namespace simulator
