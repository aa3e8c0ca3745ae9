// A captured token: a list of operator calls that one call from Python runs, through PyTorch's dispatcher.
//
// torch.classes.moe_mps.Program, which torch_moe_mps/transformers/capture/program.py builds. Values have
// places: constants -1, -2, ...; inputs, integers and results 0, 1, ... in this order.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ScalarOps.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "metal/function.h"
#include "signature.h"

namespace moe_mps {
namespace {

using Places = std::vector<int64_t>;

// A number that is always `value`, or that of a symbol, which each call gives.
struct Number {
  int64_t value, symbol;

  int64_t of(c10::ArrayRef<int64_t> symbols) const {
    return symbol < 0 ? value : symbols[static_cast<size_t>(symbol)];
  }
  bool is(int64_t number, c10::ArrayRef<int64_t> symbols) const { return number == of(symbols); }
};

// Shape, dtype and place that a tensor must have for the calls to be right.
struct Layout {
  at::ScalarType dtype;
  at::Device device;
  c10::SmallVector<Number, 5> sizes;
  std::vector<int64_t> strides;  // empty: contiguous

  explicit Layout(const at::Tensor& tensor) : dtype(tensor.scalar_type()), device(tensor.device()) {
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
struct InputView {
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

// Where the items of a call are among those of all: a token reads each once, one after the other.
struct Range {
  uint32_t first, count;
};

template <class T>
Range add_items(std::vector<T>& all, c10::ArrayRef<T> items) {
  const Range range{static_cast<uint32_t>(all.size()), static_cast<uint32_t>(items.size())};
  all.insert(all.end(), items.begin(), items.end());
  return range;
}

template <class T>
c10::ArrayRef<T> items_of(const std::vector<T>& all, Range range) {
  return c10::ArrayRef<T>(all).slice(range.first, range.count);
}

enum class List : uint8_t { kNone, kTensors, kOptionalTensors, kIntegers };

struct Argument {
  int32_t place;   // a list's: where its places are among those of all calls
  uint16_t count;  // count of places
  List list;
  bool is_tensor;
};

struct Call {
  c10::OperatorHandle op;
  Range arguments;
  Range results;  // -1: nobody reads it
  Range last;     // read by this call for the last time
  bool is_list;   // the results are those of one list
};

List list_of(const c10::Type& element) {
  if (element.kind() == c10::TypeKind::TensorType) return List::kTensors;
  return element.kind() == c10::TypeKind::IntType ? List::kIntegers : List::kOptionalTensors;
}

c10::TypePtr without_optional(c10::TypePtr type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

class Program : public torch::CustomClassHolder {
 public:
  int64_t add_constant(c10::IValue value) {
    if (value.isTensor()) layouts_.emplace_back(constants_.size(), Layout(value.toTensor()));
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
    std::vector<Argument> given;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto type = without_optional(schema.arguments()[i].type());
      const bool is_list = std::find(lists.begin(), lists.end(), static_cast<int64_t>(i)) != lists.end();
      const auto list = is_list ? list_of(*type->expectRef<c10::ListType>().getElementType()) : List::kNone;
      const int64_t place = is_list ? add_items<int64_t>(listed_, arguments[i]).first : arguments[i].at(0);
      given.push_back({static_cast<int32_t>(place), static_cast<uint16_t>(arguments[i].size()), list,
                       type->kind() == c10::TypeKind::TensorType});
    }
    const auto& returns = schema.returns();
    const bool is_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
    calls_.push_back({op, add_items<Argument>(arguments_, given), add_items<int64_t>(listed_, results),
                      add_items<int64_t>(listed_, last), is_list});
  }

  void finish(int64_t places, const Places& results) {
    places_ = places;
    results_ = results;
  }

  // Returns: the results, or nothing where the tensors are not like those that the calls are for.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& views,
                              const Places& symbols, const Places& integers) const {
    if (!fits(inputs, views, symbols)) return {};
    const int64_t begun = checks_begun();
    const WithoutChecks unchecked(checked_ == begun);
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;  // where the calls were recorded
    std::vector<c10::IValue> values(static_cast<size_t>(places_));
    auto next = std::copy(inputs.begin(), inputs.end(), values.begin());
    std::copy(integers.begin(), integers.end(), next);
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      for (const Argument& argument : items_of(arguments_, call.arguments)) push(argument, values, stack);
      forget(call.last, values);
      run_call(call, stack);
      if (call.is_list) {
        const auto list = stack[0].toTensorVector();
        stack.assign(list.begin(), list.end());
      }
      auto made = stack.begin();
      for (const int64_t place : items_of(listed_, call.results)) {
        if (place >= 0) values[place] = std::move(*made);
        ++made;
      }
      stack.clear();
    }
    checked_ = begun;
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
    return in_place && constants_fit();
  }

  bool constants_fit() const {
    const auto constant = [this](size_t i) -> const at::Tensor& {
      return constants_[layouts_[i].first].toTensor();
    };
    for (size_t i = 0; i < layouts_.size(); ++i) {
      if (i + kAhead < layouts_.size()) {  // they left the processor's caches since the last token
        const auto* ahead = reinterpret_cast<const char*>(constant(i + kAhead).unsafeGetTensorImpl());
        for (size_t byte = 0; byte < sizeof(c10::TensorImpl); byte += 64) __builtin_prefetch(ahead + byte);
      }
      if (!layouts_[i].second.fits(constant(i), {})) return false;
    }
    return true;
  }

  const c10::IValue& value(int64_t place, const std::vector<c10::IValue>& values) const {
    return place < 0 ? constants_[~place] : values[place];
  }

  void forget(Range last, std::vector<c10::IValue>& values) const {
    for (const int64_t place : items_of(listed_, last)) values[place] = c10::IValue();
  }

  void push(const Argument& argument, const std::vector<c10::IValue>& values,
            torch::jit::Stack& stack) const {
    if (argument.list == List::kNone) {
      const c10::IValue& only = value(argument.place, values);
      // A number for a tensor, as Python hands it over.
      if (argument.is_tensor && only.isScalar()) {
        stack.emplace_back(at::native::wrapped_scalar_tensor(only.toScalar()));
      } else {
        stack.push_back(only);
      }
      return;
    }
    const auto places = items_of(listed_, {static_cast<uint32_t>(argument.place), argument.count});
    if (argument.list == List::kTensors) {
      c10::List<at::Tensor> list;
      for (const int64_t place : places) list.push_back(value(place, values).toTensor());
      stack.emplace_back(std::move(list));
    } else if (argument.list == List::kIntegers) {
      c10::List<int64_t> list;
      for (const int64_t place : places) list.push_back(value(place, values).toInt());
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const int64_t place : places) list.push_back(value(place, values).toOptional<at::Tensor>());
      stack.emplace_back(std::move(list));
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

  static constexpr size_t kAhead = 8;  // constants

  std::vector<c10::IValue> constants_;
  std::vector<std::pair<size_t, Layout>> layouts_;  // for the tensors among the constants
  std::vector<Weight> weights_;
  std::vector<Layout> inputs_;
  std::vector<InputView> views_;
  std::vector<Call> calls_;
  std::vector<Argument> arguments_;
  Places listed_;
  int64_t places_ = 0;
  Places results_;
  mutable std::atomic<int64_t> checked_ = 0;  // checks_begun() when a run last checked all calls
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
