#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include "../shaders/params.h"
#include "gpu.h"
#include "metal/work.h"
#include "norms.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// The kernel for heads of keys that are so wide, the lanes that share a column of their state, and the
// simdgroups that all columns take.
struct Scan {
  std::string kernel;
  int64_t simdgroups;
};

Scan scan_of(int64_t key_width, int64_t value_width, bool delta, bool channels) {
  const int64_t rows = key_width <= 64 ? 64 : key_width <= 128 ? 128 : 256;
  const int64_t columns = kSimdWidth / (rows / kScanRows) * kScanColumns;
  const char* kind = channels ? "channel_scan" : delta ? "delta_scan" : "plain_scan";
  return {kind + std::to_string(rows), ceil_div(value_width, columns)};
}

// Arguments of the recurrence, as ops/families/gated_delta_rule.py describes them.
struct DeltaRule {
  Tensor q, k, v;
  OptionalTensor g;
  Tensor state;
  double scale;
  Tensor beta;
  std::optional<double> l2norm_eps;
  std::string_view decay;
  OptionalTensor a_log, dt_bias;
  std::optional<double> lower_bound;
  std::string_view beta_activation;
  std::optional<double> beta_min;
  OptionalTensor skip;

  bool has_channels() const { return g && g->dim() == 4; }
};

// The norm of a head's result, and the gate behind it.
struct OutputGate {
  OptionalTensor gate;
  bool is_sigmoid = false;
  std::optional<InputNorm> norm;
};

OutputGate output_gate(const OptionalTensor& gate, std::string_view activation, const OptionalTensor& weight,
                       double eps, double offset) {
  return {gate, activation == "sigmoid", input_norm(weight, eps, offset)};
}

// Tokens whose update of the state is deferred.
struct Pending {
  OptionalTensor inputs, counts;
  bool keep = false;
};

}  // namespace

template <>
struct GroupOf<DeltaRule>
    : MadeBy<aggregate<DeltaRule, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                       const Tensor&, double, const Tensor&, std::optional<double>, std::string_view,
                       const OptionalTensor&, const OptionalTensor&, std::optional<double>, std::string_view,
                       std::optional<double>, const OptionalTensor&>> {};
template <>
struct GroupOf<OutputGate> : MadeBy<output_gate> {};
template <>
struct GroupOf<Pending> : MadeBy<aggregate<Pending, const OptionalTensor&, const OptionalTensor&, bool>> {};

namespace {

// The arguments as the kernel reads them.
DeltaRule readable(DeltaRule given) {
  given.q = rows_contiguous(given.q);
  given.k = rows_contiguous(given.k);
  // Kernels count the values of kScanTokens tokens in 32 bits.
  const bool near = given.v.stride(1) < kMostElements / kScanTokens;
  given.v = near ? rows_contiguous(given.v) : given.v.contiguous();
  if (given.has_channels()) given.g = rows_contiguous(*given.g);
  given.a_log = contiguous(given.a_log);
  given.dt_bias = contiguous(given.dt_bias);
  given.skip = contiguous(given.skip);
  return given;
}

// All but the norm and the gate; everything else is zero.
GatedDeltaRuleParams params_of(const DeltaRule& given) {
  const Tensor& state = given.state;
  GatedDeltaRuleParams params{};
  params.q = token_strides(given.q);
  params.k = token_strides(given.k);
  params.v = token_strides(given.v);
  params.g = token_strides(given.g);
  params.beta = token_strides(given.beta);
  params.state_batch_stride = state.stride(0);
  params.state_head_stride = state.stride(1);
  params.state_row_stride = state.stride(2);
  params.state_column_stride = state.stride(3);
  params.tokens = given.q.size(1);
  params.key_heads = given.q.size(2);
  params.heads = given.v.size(2);
  params.key_width = given.q.size(3);
  params.value_width = given.v.size(3);
  params.decay = code_of(given.decay, {"log", "softplus", "sigmoid", "times_beta"});
  params.g_dtype = dtype_code(given.g);
  params.beta_activation = code_of(given.beta_activation, {"none", "sigmoid", "softplus"});
  params.beta_dtype = dtype_code(given.beta);
  params.has_a_log = given.a_log.has_value();
  params.a_log_dtype = dtype_code(given.a_log);
  params.has_dt_bias = given.dt_bias.has_value();
  params.dt_bias_dtype = dtype_code(given.dt_bias);
  params.has_skip = given.skip.has_value();
  params.skip_dtype = dtype_code(given.skip);
  params.has_l2norm = given.l2norm_eps.has_value();
  params.l2norm_eps = static_cast<float>(given.l2norm_eps.value_or(0.0));
  params.scale = static_cast<float>(given.scale);
  params.lower_bound = static_cast<float>(given.lower_bound.value_or(0.0));
  params.beta_min = static_cast<float>(given.beta_min.value_or(-INFINITY));
  return params;
}

void set_norm(GatedDeltaRuleParams& params, const InputNorm& norm) {
  params.has_norm = true;
  params.norm_dtype = dtype_code(norm.weight);
  params.norm_eps = static_cast<float>(norm.eps);
  params.norm_weight_offset = static_cast<float>(norm.offset);
}

void add_scan(Commands& commands, const DeltaRule& rule, const OutputGate& out, const Pending& pending,
              const GatedDeltaRuleParams& params, bool is_whole, const Tensor& output) {
  const Scan scan =
      scan_of(params.key_width, params.value_width, rule.decay != "times_beta", rule.has_channels());
  const int64_t heads = rule.q.size(0) * params.heads;
  const int64_t simdgroups = std::min(scan.simdgroups, is_whole ? kScanSimdgroups : kSliceSimdgroups);
  const double state_numbers = static_cast<double>(rule.state.numel());
  // A call of no tokens has empty tensors, in whose place another one is bound.
  const bool has_tokens = output.numel() > 0;
  const Tensor& some = has_tokens ? output : *pending.inputs;
  const OptionalTensor none;
  commands.add({"gated_delta_rule", rule.q.scalar_type()}, scan.kernel, some)
      .bind_strided(has_tokens ? rule.q : some, has_tokens ? rule.k : some, has_tokens ? rule.v : some)
      .bind_strided(has_tokens ? rule.g : none, has_tokens ? rule.beta : some)
      .bind(rule.a_log, rule.dt_bias, rule.skip)
      .bind_strided(rule.state)
      .bind(some)
      .bind_strided(has_tokens ? out.gate : none)
      .bind(out.norm ? out.norm->weight : some, pending.inputs, pending.counts)
      .params(params)
      .work(kIssueCyclesOfScan * state_numbers * static_cast<double>(params.tokens),
            static_cast<double>(rule.q.nbytes() + rule.k.nbytes() + 2 * rule.v.nbytes() +
                                2 * rule.state.nbytes()))
      .threadgroups({is_whole ? 1 : ceil_div(scan.simdgroups, simdgroups), heads}, {simdgroups * kSimdWidth});
}

Tensor run(const DeltaRule& given, OutputGate out = {}, const Pending& deferred = {}) {
  const OptionalTensor& inputs = deferred.inputs;
  Tensor output = at::empty(given.v.sizes(), given.v.options());
  if (output.numel() == 0 && (!inputs || inputs->numel() == 0 || given.state.numel() == 0)) return output;
  const Pending pending{contiguous(inputs), contiguous(deferred.counts), deferred.keep};
  const DeltaRule rule = readable(given);
  out.gate = rows_contiguous(out.gate);
  GatedDeltaRuleParams params = params_of(rule);
  params.gate = token_strides(out.gate);
  params.gate_is_sigmoid = out.is_sigmoid;
  params.pending = inputs ? inputs->size(2) : 0;
  params.keep = pending.keep;

  // The norm of a head's result needs all its columns in one threadgroup. Where heads are fewer than cores, a
  // prompt is faster with its columns spread over more of them, and a dispatch for the norm. Tokens that are
  // pending are read before they are overwritten, by one threadgroup.
  const bool has_many = rule.q.size(0) * params.heads >= gpu_cores() || params.tokens <= kScanTokens;
  const bool is_normed_here = out.norm && has_many;
  if (is_normed_here) set_norm(params, *out.norm);
  Commands commands;
  add_scan(commands, rule, out, pending, params, is_normed_here || inputs, output);
  if (!out.norm || is_normed_here) {
    commands.encode();
    if (inputs && !inputs->is_contiguous()) inputs->copy_(*pending.inputs);
    return output;
  }
  // Metal's compiler takes it that arguments of a kernel share no memory.
  Tensor normed = at::empty(output.sizes(), output.options());
  add_gated_norm(commands, output, *out.gate, *out.norm, {1, out.is_sigmoid}, normed);
  commands.encode();
  return normed;
}

Tensor gated_delta_rule_(const DeltaRule& rule) {
  return run(rule);
}

Tensor _gated_delta_rule_(const DeltaRule& rule, const OutputGate& out, const Pending& pending) {
  return run(rule, out, pending);
}

}  // namespace

MOE_OPERATOR(gated_delta_rule_)
MOE_OPERATOR(_gated_delta_rule_)

}  // namespace moe_mps
