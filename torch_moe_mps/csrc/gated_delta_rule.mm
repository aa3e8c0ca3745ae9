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

// Strides and sizes of the tensors; everything else is zero.
GatedDeltaRuleParams sizes_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                              const Tensor& beta, const OptionalTensor& gate, const Tensor& state) {
  GatedDeltaRuleParams params{};
  params.q = token_strides(q);
  params.k = token_strides(k);
  params.v = token_strides(v);
  params.g = token_strides(g);
  params.beta = token_strides(beta);
  params.gate = token_strides(gate);
  params.state_batch_stride = state.stride(0);
  params.state_head_stride = state.stride(1);
  params.state_row_stride = state.stride(2);
  params.state_column_stride = state.stride(3);
  params.tokens = q.size(1);
  params.key_heads = q.size(2);
  params.heads = v.size(2);
  params.key_width = q.size(3);
  params.value_width = v.size(3);
  return params;
}

Tensor gated_delta_rule_(const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& g_,
                         const Tensor& state, double scale, const Tensor& beta,
                         std::optional<double> l2norm_eps, std::string_view decay,
                         const OptionalTensor& a_log_, const OptionalTensor& dt_bias_,
                         std::optional<double> lower_bound, std::string_view beta_activation,
                         std::optional<double> beta_min, const OptionalTensor& skip_,
                         const OptionalTensor& gate_, std::string_view gate_activation,
                         const std::optional<InputNorm>& norm, const OptionalTensor& pending_,
                         const OptionalTensor& counts_, bool keep) {
  Tensor output = at::empty(v_.sizes(), v_.options());
  if (output.numel() == 0 && (!pending_ || pending_->numel() == 0 || state.numel() == 0)) return output;
  const OptionalTensor pending = contiguous(pending_), counts = contiguous(counts_);
  const Tensor q = rows_contiguous(q_), k = rows_contiguous(k_);
  // Kernels count the values of kScanTokens tokens in 32 bits.
  const Tensor v = v_.stride(1) < kMostElements / kScanTokens ? rows_contiguous(v_) : v_.contiguous();
  const bool channels = g_ && g_->dim() == 4;
  const OptionalTensor g = channels ? rows_contiguous(*g_) : g_;
  const OptionalTensor a_log = contiguous(a_log_), dt_bias = contiguous(dt_bias_), skip = contiguous(skip_);
  const OptionalTensor gate = rows_contiguous(gate_);
  GatedDeltaRuleParams params = sizes_of(q, k, v, g, beta, gate, state);
  params.decay = code_of(decay, {"log", "softplus", "sigmoid", "times_beta"});
  params.g_dtype = dtype_code(g);
  params.beta_activation = code_of(beta_activation, {"none", "sigmoid", "softplus"});
  params.beta_dtype = dtype_code(beta);
  params.has_a_log = a_log.has_value();
  params.a_log_dtype = dtype_code(a_log);
  params.has_dt_bias = dt_bias.has_value();
  params.dt_bias_dtype = dtype_code(dt_bias);
  params.has_skip = skip.has_value();
  params.skip_dtype = dtype_code(skip);
  params.has_l2norm = l2norm_eps.has_value();
  params.gate_is_sigmoid = gate_activation == "sigmoid";
  params.pending = pending ? pending->size(2) : 0;
  params.keep = keep;
  params.l2norm_eps = static_cast<float>(l2norm_eps.value_or(0.0));
  params.scale = static_cast<float>(scale);
  params.lower_bound = static_cast<float>(lower_bound.value_or(0.0));
  params.beta_min = static_cast<float>(beta_min.value_or(-INFINITY));

  // The norm of a head's result needs all its columns in one threadgroup. Where heads are fewer than cores, a
  // prompt is faster with its columns spread over more of them, and a dispatch for the norm. Tokens that are
  // pending are read before they are overwritten, by one threadgroup.
  const Scan scan = scan_of(params.key_width, params.value_width, decay != "times_beta", channels);
  const int64_t heads = q.size(0) * params.heads;
  const bool is_normed_here = norm && (heads >= gpu_cores() || params.tokens <= kScanTokens);
  const bool is_whole = is_normed_here || pending;
  const int64_t simdgroups = std::min(scan.simdgroups, is_whole ? kScanSimdgroups : kSliceSimdgroups);
  if (is_normed_here) {
    params.has_norm = true;
    params.norm_dtype = dtype_code(norm->weight);
    params.norm_eps = static_cast<float>(norm->eps);
    params.norm_weight_offset = static_cast<float>(norm->offset);
  }
  // A call of no tokens has empty tensors, in whose place another one is bound.
  const bool has_tokens = output.numel() > 0;
  const Tensor some = has_tokens ? output : *pending;
  const OptionalTensor none;
  Commands commands;
  commands.add({"gated_delta_rule", q.scalar_type()}, scan.kernel, some)
      .bind_strided(has_tokens ? q : some, has_tokens ? k : some, has_tokens ? v : some)
      .bind_strided(has_tokens ? g : none, has_tokens ? beta : some)
      .bind(a_log, dt_bias, skip)
      .bind_strided(state)
      .bind(some)
      .bind_strided(has_tokens ? gate : none)
      .bind(norm ? norm->weight : some, pending, counts)
      .params(params)
      .work(kSlotsOfScan * static_cast<double>(state.numel()) * static_cast<double>(params.tokens),
            static_cast<double>(q.nbytes() + k.nbytes() + 2 * v.nbytes() + 2 * state.nbytes()))
      .threadgroups({is_whole ? 1 : ceil_div(scan.simdgroups, simdgroups), heads}, {simdgroups * kSimdWidth});
  if (!norm || is_normed_here) {
    commands.encode();
    if (pending && !pending_->is_contiguous()) pending_->copy_(*pending);
    return output;
  }
  // Metal's compiler takes it that arguments of a kernel share no memory.
  Tensor normed = at::empty(output.sizes(), output.options());
  add_gated_norm(commands, output, *gate, *norm, {1, gate_activation == "sigmoid"}, normed);
  commands.encode();
  return normed;
}

}  // namespace

MOE_OPERATOR(gated_delta_rule_)

}  // namespace moe_mps
