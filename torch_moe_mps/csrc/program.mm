// A captured token: a list of operator calls that one call from Python runs, through PyTorch's dispatcher.
//
// torch.classes.moe_mps.Program, which torch_moe_mps/models/capture/program.py builds. Values have
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
#include <limits>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "metal/function.h"
#include "signature.h"

namespace moe_mps {
namespace {

using Places = std::vector<int64_t>;

// A number that is always `value`, or that of a symbol.
struct Number {
  int64_t value, symbol;
};

// The numbers of a call's symbols: the first place where a symbol stands says what it is, and all others must
// agree.
class Symbols {
 public:
  explicit Symbols(size_t count) : values_(count, kUnknown) {}

  bool agree(const Number& number, int64_t found) {
    if (number.symbol < 0) return found == number.value;
    int64_t& value = values_[static_cast<size_t>(number.symbol)];
    if (value == kUnknown) value = found;
    return value == found;
  }

  int64_t operator[](size_t symbol) const { return values_[symbol]; }

 private:
  static constexpr int64_t kUnknown = std::numeric_limits<int64_t>::min();

  c10::SmallVector<int64_t, 8> values_;
};

int64_t floor_quotient(int64_t a, int64_t b) {
  TORCH_CHECK(b != 0, "moe_mps::Program: a divisor of a captured token must not be 0");
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t power(int64_t base, int64_t exponent) {
  TORCH_CHECK(exponent >= 0, "moe_mps::Program: an exponent of a captured token must not be negative");
  int64_t result = 1;
  for (; exponent > 0; --exponent) result *= base;
  return result;
}

using Operation = int64_t (*)(int64_t, int64_t);

// As Python computes with integers.
const std::unordered_map<std::string, Operation>& operations() {
  static const auto& known = *new std::unordered_map<std::string, Operation>{
      {"+", [](int64_t a, int64_t b) { return a + b; }},
      {"*", [](int64_t a, int64_t b) { return a * b; }},
      {"//", floor_quotient},
      {"%", [](int64_t a, int64_t b) { return a - b * floor_quotient(a, b); }},
      {"**", power},
      {"max", [](int64_t a, int64_t b) { return std::max(a, b); }},
      {"min", [](int64_t a, int64_t b) { return std::min(a, b); }},
      {"==", [](int64_t a, int64_t b) { return int64_t{a == b}; }},
      {"!=", [](int64_t a, int64_t b) { return int64_t{a != b}; }},
      {"<", [](int64_t a, int64_t b) { return int64_t{a < b}; }},
      {"<=", [](int64_t a, int64_t b) { return int64_t{a <= b}; }},
      {">", [](int64_t a, int64_t b) { return int64_t{a > b}; }},
      {">=", [](int64_t a, int64_t b) { return int64_t{a >= b}; }},
      {"and", [](int64_t a, int64_t b) { return a & b; }},
      {"or", [](int64_t a, int64_t b) { return a | b; }},
  };
  return known;
}

// An integer that is computed from symbols, in postfix: "s0 2 // 1 +" has symbol 0.
class Expression {
 public:
  explicit Expression(const std::string& postfix) {
    std::istringstream words(postfix);
    int64_t depth = 0;
    for (std::string word; words >> word;) {
      if (const auto found = operations().find(word); found != operations().end()) {
        steps_.push_back({found->second, {}});
        --depth;
      } else {
        const bool is_symbol = word[0] == 's';
        const int64_t number = std::stoll(word.substr(is_symbol));
        steps_.push_back({nullptr, is_symbol ? Number{0, number} : Number{number, -1}});
        ++depth;
      }
      TORCH_CHECK_VALUE(depth > 0, "moe_mps::Program: an expression must be in postfix, got ", postfix);
    }
    TORCH_CHECK_VALUE(depth == 1, "moe_mps::Program: an expression must have one value, got ", postfix);
  }

  int64_t of(const Symbols& symbols) const {
    c10::SmallVector<int64_t, 16> stack;
    for (const auto& [operation, number] : steps_) {
      if (operation == nullptr) {
        stack.push_back(number.symbol < 0 ? number.value : symbols[static_cast<size_t>(number.symbol)]);
      } else {
        const int64_t right = stack.pop_back_val();
        stack.back() = operation(stack.back(), right);
      }
    }
    return stack.back();
  }

 private:
  std::vector<std::pair<Operation, Number>> steps_;  // without an operation: the number
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

  bool fits(const at::Tensor& tensor, Symbols& symbols) const {
    if (tensor.scalar_type() != dtype || tensor.device() != device) return false;
    if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (!symbols.agree(sizes[i], tensor.sizes()[i])) return false;
    }
    return strides.empty() ? tensor.is_contiguous() : tensor.strides() == strides;
  }
};

// A view of tokens, the last dimension but one, and of neighbouring columns of an input.
struct InputView {
  int64_t input;
  Number start, tokens;
  int64_t column, width;

  bool fits(const at::Tensor& view, const at::Tensor& memory, Symbols& symbols) const {
    const int64_t dim = memory.dim() - 2;
    if (view.dim() != memory.dim() || view.scalar_type() != memory.scalar_type()) return false;
    for (int64_t i = 0; i < dim; ++i) {
      if (view.size(i) != memory.size(i)) return false;
    }
    const int64_t offset = view.storage_offset() - memory.storage_offset(), stride = memory.stride(dim);
    return view.is_alias_of(memory) && view.strides() == memory.strides() && view.size(-1) == width &&
           symbols.agree(tokens, view.size(dim)) && offset % stride == column &&
           symbols.agree(start, offset / stride);
  }

  // The token behind the last one of a view that fits.
  int64_t end_of(const at::Tensor& view, const at::Tensor& memory) const {
    return (view.storage_offset() - memory.storage_offset()) / view.stride(-2) + view.size(-2);
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
  Range results;        // -1: nobody reads it
  Range last;           // read by this call for the last time
  bool is_list;         // the results are those of one list
  bool writes = false;  // tensors that the model's call holds, so that it cannot be repeated
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

  // The next symbol stands for numbers from `least` on.
  void add_symbol(int64_t least) { least_.push_back(least); }

  // The next number of a call is that of a symbol.
  void add_number(int64_t symbol) { numbers_.push_back({0, symbol}); }

  // What a call computes from its symbols: a condition of all calls, or the next integer of the operators.
  void add_guard(const std::string& postfix) { guards_.emplace_back(postfix); }
  void add_integer(const std::string& postfix) { integers_.emplace_back(postfix); }

  // The next input is like `example`, with the number of a symbol in each of these dimensions.
  void add_input(const at::Tensor& example, const Places& dims, const Places& symbols) {
    inputs_.emplace_back(example);
    for (size_t i = 0; i < dims.size(); ++i) inputs_.back().sizes.at(dims[i]).symbol = symbols.at(i);
  }

  // The next input behind those of the call comes from another process when the call is bound.
  void add_arriving(const at::Tensor& example) { arriving_.emplace_back(example); }

  // The next buffer must be written as far as this view shows it.
  void add_buffer(int64_t view) { buffers_.push_back(static_cast<size_t>(view)); }

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

  // The last call writes tensors that the model's call holds.
  void mark_written() { calls_.back().writes = true; }

  void finish(int64_t places, const Places& results) {
    places_ = places;
    results_ = results;
  }

  // What differs between a call and the captured one, empty if nothing does; and the call's symbols.
  //
  // `numbers` are those of the cache, `ends` of its buffers.
  std::string difference(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& views,
                         const Places& numbers, const Places& ends, Symbols& symbols) const {
    if (inputs.size() != inputs_.size() || views.size() != views_.size() ||
        numbers.size() != numbers_.size() || ends.size() != buffers_.size()) {
      return "it has other tensors";
    }
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (!symbols.agree(numbers_[i], numbers[i])) {
        return "numbers that were equal in the captured call differ";
      }
    }
    const bool takes_inference = c10::InferenceMode::is_enabled();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs_[i].fits(inputs[i], symbols)) {
        return "a tensor has another shape, dtype or device than in the captured call";
      }
      if (!takes_inference && inputs[i].is_inference()) {  // it may be written
        return "a tensor of inference mode is used outside of it";
      }
    }
    for (size_t i = 0; i < views.size(); ++i) {
      if (!views_[i].fits(views[i], inputs[views_[i].input], symbols)) {
        return "a tensor of the cache shows another part of its buffer than in the captured call";
      }
    }
    for (size_t i = 0; i < ends.size(); ++i) {
      const size_t view = buffers_[i];
      if (ends[i] != views_[view].end_of(views[view], inputs[views_[view].input])) {
        return "somebody else has written behind the cache's last token";
      }
    }
    if (!holds_for(symbols)) return "the call has sizes for which the model runs other operators";
    const bool in_place = std::all_of(weights_.begin(), weights_.end(), [](const Weight& weight) {
      return weight.tensor.storage().data() == weight.storage.data() &&
             weight.tensor.storage_offset() == weight.offset;
    });
    if (!in_place) return "a weight lies elsewhere in memory than in the captured call";
    return constants_fit() ? "" : "a weight has another shape, dtype or device than in the captured call";
  }

  Symbols symbols() const { return Symbols(least_.size()); }

  Places integers(const Symbols& symbols) const {
    Places result;
    for (const Expression& integer : integers_) result.push_back(integer.of(symbols));
    return result;
  }

  bool arriving_fits(const std::vector<at::Tensor>& arriving) const {
    Symbols none(0);
    return std::equal(
        arriving.begin(), arriving.end(), arriving_.begin(), arriving_.end(),
        [&](const at::Tensor& tensor, const Layout& layout) { return layout.fits(tensor, none); });
  }

  // The results of a call that is bound. `has_written` becomes true before the first call that writes what
  // the model's call holds.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& arriving,
                              const Places& integers, bool& has_written) const {
    const int64_t begun = checks_begun();
    const WithoutChecks unchecked(checked_ == begun);
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;  // where the calls were recorded
    std::vector<c10::IValue> values(static_cast<size_t>(places_));
    auto next = std::copy(inputs.begin(), inputs.end(), values.begin());
    next = std::copy(arriving.begin(), arriving.end(), next);
    std::copy(integers.begin(), integers.end(), next);
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      for (const Argument& argument : items_of(arguments_, call.arguments)) push(argument, values, stack);
      forget(call.last, values);
      has_written |= call.writes;
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

 private:
  bool holds_for(const Symbols& symbols) const {
    for (size_t i = 0; i < least_.size(); ++i) {
      if (symbols[i] < least_[i]) return false;
    }
    return std::all_of(guards_.begin(), guards_.end(),
                       [&](const Expression& guard) { return guard.of(symbols) != 0; });
  }

  bool constants_fit() const {
    Symbols none(0);
    const auto constant = [this](size_t i) -> const at::Tensor& {
      return constants_[layouts_[i].first].toTensor();
    };
    for (size_t i = 0; i < layouts_.size(); ++i) {
      if (i + kAhead < layouts_.size()) {  // they left the processor's caches since the last token
        const auto* ahead = reinterpret_cast<const char*>(constant(i + kAhead).unsafeGetTensorImpl());
        for (size_t byte = 0; byte < sizeof(c10::TensorImpl); byte += 64) __builtin_prefetch(ahead + byte);
      }
      if (!layouts_[i].second.fits(constant(i), none)) return false;
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
  Places least_;  // of the symbols
  std::vector<Number> numbers_;
  std::vector<Expression> guards_, integers_;
  std::vector<Layout> inputs_, arriving_;
  std::vector<InputView> views_;
  std::vector<size_t> buffers_;  // for each a view of it
  std::vector<Call> calls_;
  std::vector<Argument> arguments_;
  Places listed_;
  int64_t places_ = 0;
  Places results_;
  mutable std::atomic<int64_t> checked_ = 0;  // checks_begun() when a run last checked all calls
};

// A call of the model that a program is for.
class Bound : public torch::CustomClassHolder {
 public:
  Bound(c10::intrusive_ptr<Program> program, std::vector<at::Tensor> inputs, Places integers)
      : program_(std::move(program)), inputs_(std::move(inputs)), integers_(std::move(integers)) {}

  // The results and the integers of the call; no results where other tensors arrive than did.
  std::tuple<std::vector<at::Tensor>, Places> run(const std::vector<at::Tensor>& arriving) {
    if (!program_->arriving_fits(arriving)) return {};
    return {program_->run(inputs_, arriving, integers_, has_written_), integers_};
  }

  // True if a run has written what the model's call holds: it cannot be repeated after an error.
  bool has_written() const { return has_written_; }

 private:
  c10::intrusive_ptr<Program> program_;
  std::vector<at::Tensor> inputs_;
  Places integers_;
  bool has_written_ = false;
};

// The call, bound; text that says what differs where the program is for other calls.
c10::IValue bind(const c10::intrusive_ptr<Program>& program, std::vector<at::Tensor> inputs,
                 const std::vector<at::Tensor>& views, const Places& numbers, const Places& ends) {
  Symbols symbols = program->symbols();
  std::string difference = program->difference(inputs, views, numbers, ends, symbols);
  if (!difference.empty()) return difference;
  return c10::make_intrusive<Bound>(program, std::move(inputs), program->integers(symbols));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.class_<Bound>("Bound")
      .def("run", [](const c10::intrusive_ptr<Bound>& self,
                     const std::vector<at::Tensor>& arriving) { return self->run(arriving); })
      .def("has_written", [](const c10::intrusive_ptr<Bound>& self) { return self->has_written(); });
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("add_constant", &Program::add_constant)
      .def("add_weight", &Program::add_weight)
      .def("add_symbol", &Program::add_symbol)
      .def("add_number", &Program::add_number)
      .def("add_guard", &Program::add_guard)
      .def("add_integer", &Program::add_integer)
      .def("add_input", &Program::add_input)
      .def("add_arriving", &Program::add_arriving)
      .def("add_view", &Program::add_view)
      .def("add_buffer", &Program::add_buffer)
      .def("add_call", &Program::add_call)
      .def("mark_written", &Program::mark_written)
      .def("finish", &Program::finish)
      .def("bind", bind);
}

}  // namespace moe_mps
