// A captured token: a list of operator calls that one call from Python runs, through PyTorch's dispatcher.
//
// torch.classes.moe_mps.Program; torch_moe_mps/transformers/capture/program.py builds it, and has the same in
// Python. Values have places: constants -1, -2, ...; inputs, integers and results 0, 1, ... in this order.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ScalarOps.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace moe_mps {
namespace {

using Places = std::vector<int64_t>;

// A number that is always `value`, or that of a symbol, which each call gives.
struct Number {
  int64_t value, symbol;

  bool is(int64_t number, c10::ArrayRef<int64_t> symbols) const {
    return number == (symbol < 0 ? value : symbols[static_cast<size_t>(symbol)]);
  }
};

// What a tensor must be like for the calls to be right.
struct Kind {
  at::ScalarType dtype;
  at::Device device;
  std::vector<Number> sizes;
  std::vector<int64_t> strides;  // empty: contiguous

  explicit Kind(const at::Tensor& tensor) : dtype(tensor.scalar_type()), device(tensor.device()) {
    for (const int64_t size : tensor.sizes()) sizes.push_back({size, -1});
    if (!tensor.is_contiguous()) strides = tensor.strides().vec();
  }

  bool fits(const at::Tensor& tensor, c10::ArrayRef<int64_t> symbols) const {
    if (tensor.scalar_type() != dtype || tensor.device() != device) return false;
    if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (!sizes[i].is(tensor.sizes()[i], symbols)) return false;
    }
    return strides.empty() ? tensor.is_contiguous() : tensor.strides() == strides;
  }
};

// A view of tokens, the last dimension but one, and of neighbouring columns of an input.
struct Shown {
  int64_t input;
  Number start, tokens;
  int64_t column, width;

  bool fits(const at::Tensor& view, const at::Tensor& memory, c10::ArrayRef<int64_t> symbols) const {
    const int64_t dim = memory.dim() - 2;
    if (view.dim() != memory.dim() || view.scalar_type() != memory.scalar_type()) return false;
    for (int64_t i = 0; i < dim; ++i) {
      if (view.size(i) != memory.size(i)) return false;
    }
    const int64_t offset = view.storage_offset() - memory.storage_offset(), stride = memory.stride(dim);
    return view.is_alias_of(memory) && view.strides() == memory.strides() && view.size(-1) == width &&
           tokens.is(view.size(dim), symbols) && offset % stride == column &&
           start.is(offset / stride, symbols);
  }
};

// Where a tensor lies. Its storage is kept, so that no other one gets its address.
struct Weight {
  at::Tensor tensor;
  c10::Storage storage;
  int64_t offset;
};

struct Argument {
  Places places;  // one, or those of a list
  bool is_tensor;
  c10::TypePtr element;  // of a list, or null
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  Places results;  // -1: nobody reads it
  Places last;     // what this call is the last to read
  bool is_list;    // the results are those of one list
};

c10::TypePtr without_optional(c10::TypePtr type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

class Program : public torch::CustomClassHolder {
 public:
  int64_t add_constant(c10::IValue value) {
    if (value.isTensor()) kinds_.emplace_back(constants_.size(), Kind(value.toTensor()));
    constants_.push_back(std::move(value));
    return -static_cast<int64_t>(constants_.size());
  }

  // A tensor that must stay where it is, as calls read a matrix in which it lies.
  void add_weight(const at::Tensor& tensor) {
    weights_.push_back({tensor, tensor.storage(), tensor.storage_offset()});
  }

  // The next input is like `example`, with the number of a symbol in each of these dimensions.
  void add_input(const at::Tensor& example, const Places& dims, const Places& symbols) {
    inputs_.emplace_back(example);
    for (size_t i = 0; i < dims.size(); ++i) inputs_.back().sizes.at(dims[i]).symbol = symbols.at(i);
  }

  // The next view is of `width` columns of an input and of `tokens` tokens; a symbol below 0 stands for none.
  void add_view(int64_t input, int64_t start, int64_t start_symbol, int64_t tokens, int64_t tokens_symbol,
                int64_t column, int64_t width) {
    views_.push_back({input, {start, start_symbol}, {tokens, tokens_symbol}, column, width});
  }

  // Each argument is a list of places; `lists` are the numbers of those that are lists for the operator, too.
  void add_call(const std::string& name, const std::string& overload, const std::vector<Places>& arguments,
                const Places& lists, const Places& results, const Places& last) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& schema = op.schema();
    TORCH_CHECK_VALUE(arguments.size() == schema.arguments().size(), "moe_mps::Program: arguments of ", name,
                      " must be ", schema.arguments().size(), ", got ", arguments.size());
    Call call{op, {}, results, last, false};
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto type = without_optional(schema.arguments()[i].type());
      call.arguments.push_back({arguments[i], type->kind() == c10::TypeKind::TensorType, nullptr});
    }
    for (const int64_t i : lists) {
      const auto type = without_optional(schema.arguments().at(i).type());
      call.arguments[i].element = type->expectRef<c10::ListType>().getElementType();
    }
    const auto& returns = schema.returns();
    call.is_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
    calls_.push_back(std::move(call));
  }

  void finish(int64_t places, const Places& results) {
    places_ = places;
    results_ = results;
  }

  // Returns: the results, or nothing where the tensors are not like those that the calls are for.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& views,
                              const Places& symbols, const Places& integers) const {
    if (!fits(inputs, views, symbols)) return {};
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;  // where the calls were recorded
    std::vector<c10::IValue> values(static_cast<size_t>(places_));
    auto next = std::copy(inputs.begin(), inputs.end(), values.begin());
    std::copy(integers.begin(), integers.end(), next);
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      for (const Argument& argument : call.arguments) stack.push_back(given(argument, values));
      for (const int64_t place : call.last) values[place] = c10::IValue();
      run_call(call, stack);
      if (call.is_list) {
        const auto list = stack[0].toTensorVector();
        stack.assign(list.begin(), list.end());
      }
      for (size_t i = 0; i < call.results.size(); ++i) {
        if (call.results[i] >= 0) values[call.results[i]] = std::move(stack[i]);
      }
      stack.clear();
    }
    std::vector<at::Tensor> results;
    for (const int64_t place : results_) results.push_back(value(place, values).toTensor());
    return results;
  }

  int64_t size() const { return static_cast<int64_t>(calls_.size()); }

 private:
  bool fits(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& views,
            const Places& symbols) const {
    if (inputs.size() != inputs_.size() || views.size() != views_.size()) return false;
    const bool takes_inference = c10::InferenceMode::is_enabled();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs_[i].fits(inputs[i], symbols)) return false;
      if (!takes_inference && inputs[i].is_inference()) return false;  // it may be written
    }
    for (size_t i = 0; i < views.size(); ++i) {
      if (!views_[i].fits(views[i], inputs[views_[i].input], symbols)) return false;
    }
    const bool in_place = std::all_of(weights_.begin(), weights_.end(), [](const Weight& weight) {
      return weight.tensor.storage().data() == weight.storage.data() &&
             weight.tensor.storage_offset() == weight.offset;
    });
    return in_place && std::all_of(kinds_.begin(), kinds_.end(), [&](const auto& known) {
             return known.second.fits(constants_[known.first].toTensor(), {});
           });
  }

  const c10::IValue& value(int64_t place, const std::vector<c10::IValue>& values) const {
    return place < 0 ? constants_[~place] : values[place];
  }

  c10::IValue given(const Argument& argument, const std::vector<c10::IValue>& values) const {
    if (!argument.element) {
      const c10::IValue& only = value(argument.places[0], values);
      // A number for a tensor, as Python hands it over.
      if (argument.is_tensor && only.isScalar()) return at::native::wrapped_scalar_tensor(only.toScalar());
      return only;
    }
    switch (argument.element->kind()) {
      case c10::TypeKind::TensorType: {
        c10::List<at::Tensor> list;
        for (const int64_t place : argument.places) list.push_back(value(place, values).toTensor());
        return list;
      }
      case c10::TypeKind::IntType: {
        c10::List<int64_t> list;
        for (const int64_t place : argument.places) list.push_back(value(place, values).toInt());
        return list;
      }
      default: {
        c10::List<std::optional<at::Tensor>> list;
        for (const int64_t place : argument.places) {
          list.push_back(value(place, values).toOptional<at::Tensor>());
        }
        return list;
      }
    }
  }

  static void run_call(const Call& call, torch::jit::Stack& stack) {
    try {
      call.op.callBoxed(stack);
    } catch (c10::Error& error) {
      error.add_context(c10::str("in ", call.op.operator_name(), ", an operator of a captured token"));
      throw;
    }
  }

  std::vector<c10::IValue> constants_;
  std::vector<std::pair<size_t, Kind>> kinds_;  // of the tensors among the constants
  std::vector<Weight> weights_;
  std::vector<Kind> inputs_;
  std::vector<Shown> views_;
  std::vector<Call> calls_;
  int64_t places_ = 0;
  Places results_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("add_constant", &Program::add_constant)
      .def("add_weight", &Program::add_weight)
      .def("add_input", &Program::add_input)
      .def("add_view", &Program::add_view)
      .def("add_call", &Program::add_call)
      .def("finish", &Program::finish)
      .def("run",
           [](const c10::intrusive_ptr<Program>& self, const std::vector<at::Tensor>& inputs,
              const std::vector<at::Tensor>& views, const std::vector<int64_t>& symbols,
              const std::vector<int64_t>& integers) { return self->run(inputs, views, symbols, integers); })
      .def("size", &Program::size);
}

}  // namespace moe_mps
