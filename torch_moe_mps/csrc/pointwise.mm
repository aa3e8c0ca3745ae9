#include <ATen/core/Tensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <sstream>

#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr std::initializer_list<std::string_view> kOperations = {
    "to",   "neg",  "exp", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "silu", "softplus",
    "tanh", "relu", "cos", "sin", "add",   "sub",  "mul",   "div",     "max",  "min"};

struct Formula {
  PointwiseStep code[POINTWISE_STEPS];
  uint32_t steps = 0;
  float numbers[POINTWISE_NUMBERS];
  uint32_t count = 0;  // count of numbers
};

uint8_t operand(Formula& formula, const std::string& text) {
  if (text[0] == '%') return POINTWISE_FIRST_STEP + std::stoi(text.substr(1));
  if (text.size() == 1 && text[0] >= 'a' && text[0] <= 'f') return text[0] - 'a';
  const float number = std::stod(text);
  uint32_t place = 0;
  while (place < formula.count && std::memcmp(&formula.numbers[place], &number, sizeof(number)) != 0) ++place;
  if (place == formula.count) formula.numbers[formula.count++] = number;
  return POINTWISE_FIRST_NUMBER + place;
}

// The checks have seen the text: it has the form that they want.
Formula parsed(std::string text) {
  Formula formula;
  std::replace(text.begin(), text.end(), ';', '\n');
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<std::string> found;
    for (std::string word; words >> word;) found.push_back(word);
    PointwiseStep& step = formula.code[formula.steps++];
    step.operation = code_of(found.front(), kOperations);
    step.x = operand(formula, found[1]);
    step.y = found.size() > 3 ? operand(formula, found[2]) : step.x;
    step.dtype = code_of(found.back(), {"f32", "f16", "bf16"});
  }
  return formula;
}

const Formula& formula_of(std::string_view text) {
  static thread_local std::map<std::string, Formula, std::less<>> known;
  const auto found = known.find(text);
  if (found != known.end()) return found->second;
  return known.emplace(text, parsed(std::string(text))).first->second;
}

uint8_t number_code(const Tensor& tensor) {
  if (tensor.scalar_type() == at::kInt) return DTYPE_INT;
  return tensor.scalar_type() == at::kLong ? DTYPE_LONG : dtype_code(tensor);
}

Tensor _pointwise(const Tensor& a, std::string_view text, std::string_view dtype_name,
                  const OptionalTensor& b, const OptionalTensor& c, const OptionalTensor& d,
                  const OptionalTensor& e, const OptionalTensor& f, bool mean) {
  const Formula& formula = formula_of(text);
  const c10::ScalarType dtype = dtype_named(dtype_name);
  const std::array<const Tensor*, POINTWISE_INPUTS> inputs = {&a,           tensor_of(b), tensor_of(c),
                                                              tensor_of(d), tensor_of(e), tensor_of(f)};
  c10::SmallVector<int64_t, POINTWISE_RANK> shape;
  for (const Tensor* input : inputs) {
    if (input != nullptr) {
      const auto both = at::infer_size_dimvector(shape, input->sizes());
      shape.assign(both.begin(), both.end());
    }
  }
  PointwiseParams params{};
  params.terms = 1;
  auto of_output = shape;
  if (mean) {
    const auto streams = shape.end() - 2;
    params.terms = *streams;
    *streams = 1;
    of_output.erase(of_output.end() - 2);
  }
  const Tensor output = at::empty(of_output, a.options().dtype(dtype));
  if (output.numel() == 0) return output;

  params.count = output.numel();
  params.steps = formula.steps;
  std::copy(std::begin(formula.code), std::end(formula.code), params.code);
  std::copy(std::begin(formula.numbers), std::end(formula.numbers), params.numbers);
  const int64_t rank = shape.size(), free = POINTWISE_RANK - rank;
  for (int64_t dim = 0; dim < POINTWISE_RANK; ++dim) params.sizes[dim] = dim < free ? 1 : shape[dim - free];
  Commands commands;
  Command& command = commands.add({"pointwise", dtype}, "pointwise");
  for (size_t i = 0; i < inputs.size(); ++i) {
    params.dtypes[i] = DTYPE_NONE;
    if (inputs[i] == nullptr) {
      command.bind(output);
      continue;
    }
    const Tensor& input = *inputs[i];
    params.dtypes[i] = number_code(input);
    for (int64_t dim = 0; dim < input.dim(); ++dim) {
      const int64_t stride = input.size(dim) == 1 ? 0 : input.stride(dim);
      TORCH_CHECK(stride <= kMostElements, "moe_mps::_pointwise: an input is too far apart");
      params.strides[i][POINTWISE_RANK - input.dim() + dim] = stride;
    }
    command.bind_strided(input);
  }
  command.bind(output).params(params).threadgroups({ceil_div(params.count, kPointwiseThreads)},
                                                   {kPointwiseThreads});
  commands.encode();
  return output;
}

}  // namespace

MOE_OPERATOR(_pointwise)

}  // namespace moe_mps
