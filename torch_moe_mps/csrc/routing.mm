#include "routing.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>

#include "../shaders/geometry.h"
#include "../shaders/params.h"
#include "norms.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

// The smallest normal float16: the floor of the sum in moe_router_topk_softmax.
constexpr double kSoftmaxNormMin = 6.103515625e-05;

Routing empty_routing(const Tensor& like, at::IntArrayRef leading, int64_t top_k) {
  auto shape = leading.vec();
  shape.push_back(top_k);
  return {at::empty(shape, like.options().dtype(at::kFloat)),
          at::empty(shape, like.options().dtype(at::kInt))};
}

// [T, N] with the leading dimensions of x.
Tensor with_leading_of(const Tensor& x, const Tensor& rows) {
  auto shape = x.sizes().vec();
  shape.back() = rows.size(-1);
  return rows.view(shape);
}

// moe_router and its special cases

uint32_t scoring_code(std::string_view scoring) {
  return code_of(scoring, {"softmax", "sigmoid", "sqrtsoftplus", "softmax_after_topk"});
}

// The params that all routers start from: one group, no bias, no scale.
RouterParams plain_router(uint32_t scoring, int64_t top_k) {
  RouterParams params{};
  params.scoring = scoring;
  params.top_k = top_k;
  params.groups = 1;
  params.top_groups = 1;
  params.scaling_factor = 1.0f;
  return params;
}

void set_normalisation(RouterParams& params, double eps, double minimum) {
  params.normalise = 1;
  params.sum_eps = static_cast<float>(eps);
  params.sum_min = minimum > 0.0 ? static_cast<float>(minimum) : -std::numeric_limits<float>::infinity();
}

constexpr int64_t kLeastExperts = 2, kMostExperts = 32;  // that a lane of a kernel holds

int64_t experts_per_lane(int64_t experts) {
  int64_t count = kLeastExperts;
  while (count * kSimdWidth < experts) count *= 2;
  return count;
}

Library routing_library(int64_t of_lane, c10::ScalarType dtype) {
  Library library{"routing", dtype};
  library.width = of_lane;
  return library;
}

Router router_with(const Tensor& logits_, const OptionalTensor& bias, const OptionalTensor& scale,
                   RouterParams params) {
  Router router{logits_.contiguous(), contiguous(bias), contiguous(scale), params};
  const Tensor& logits = router.logits;
  router.params.experts = logits.size(-1);
  router.params.rows = logits.numel() / logits.size(-1);
  router.params.vectorised = rows_start_aligned(logits.size(-1), {logits});
  router.params.wide_logits = logits.scalar_type() == at::kFloat;
  router.params.has_bias = bias.has_value();
  router.params.bias_dtype = dtype_code(bias);
  router.params.has_scale = scale.has_value();
  router.params.scale_dtype = dtype_code(scale);
  return router;
}

Routing in_ids_dtype(const Routing& routing, std::string_view name) {
  const auto& [weights, ids] = routing;
  return {weights, name == "int64" ? ids.to(at::kLong) : ids};
}

Routing moe_router(const Router& router, std::string_view ids_dtype) {
  return in_ids_dtype(route(router), ids_dtype);
}

Routing moe_router_topk_softmax(const Tensor& logits, int64_t top_k, bool norm_topk_prob,
                                std::string_view ids_dtype) {
  RouterParams params = plain_router(SCORING_SOFTMAX, top_k);
  if (norm_topk_prob) set_normalisation(params, 0.0, kSoftmaxNormMin);
  return in_ids_dtype(route(router_with(logits, std::nullopt, std::nullopt, params)), ids_dtype);
}

Routing fused_moe_routing(const Tensor& logits, const Tensor& per_expert_scale, int64_t top_k,
                          std::string_view ids_dtype) {
  const RouterParams params = plain_router(SCORING_SOFTMAX_AFTER_TOPK, top_k);
  return in_ids_dtype(route(router_with(logits, std::nullopt, per_expert_scale, params)), ids_dtype);
}

// The router's matmul, and moe_gate

// logits[T, E] = factor * norm(hidden) @ router^T + bias in `dtype`.
Tensor logits_of(const Tensor& hidden, const Tensor& router, const std::optional<InputNorm>& norm,
                 const OptionalTensor& bias, c10::ScalarType dtype, double factor = 1.0) {
  // From this many tokens, threadgroups of several tokens fill the GPU; they read the router less often.
  // Untuned.
  constexpr int64_t kManyLogitsTokens = 9;
  const int64_t tokens = hidden.size(0), experts = router.size(0);
  const bool is_wide = hidden.size(1) > 0;  // an empty tensor cannot be bound
  Tensor logits = at::empty({tokens, experts}, hidden.options().dtype(dtype));
  RouterLogitsParams params{};
  params.tokens = tokens;
  params.experts = experts;
  params.width = hidden.size(1);
  params.vectorised = rows_start_aligned(params.width, {hidden, router, norm ? norm->weight : hidden});
  params.hidden_dtype = dtype_code(hidden);
  if (norm) {
    params.norm_dtype = dtype_code(norm->weight);
    params.eps = static_cast<float>(norm->eps);
    params.norm_weight_offset = static_cast<float>(norm->offset);
  }
  params.factor = static_cast<float>(factor);
  params.has_bias = bias.has_value();
  params.bias_dtype = dtype_code(bias);
  params.logits_dtype = dtype_code(logits);
  const bool many = tokens >= kManyLogitsTokens;
  const int64_t experts_of_group = many ? kLogitsSimdgroups * kLogitsExperts : kLogitsFewExperts;
  Commands commands;
  commands
      .add({"routing_logits", router.scalar_type()},
           std::string(norm ? "normed_logits" : "logits") + (many ? "_many" : "_few"), logits)
      .bind(is_wide ? hidden : logits, is_wide ? router : logits, is_wide && norm ? norm->weight : logits,
            bias, logits)
      .params(params)
      .threadgroups({ceil_div(experts, experts_of_group), ceil_div(tokens, many ? kLogitsTokens : 1)},
                    {kLogitsSimdgroups * kSimdWidth});
  commands.encode();
  return logits;
}

Tensor router_logits(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const std::optional<InputNorm>& norm, std::string_view dtype, double factor) {
  // For more tokens, PyTorch's matmul of float32 copies is faster. Not measured.
  constexpr int64_t kMostTokens = 32;
  const c10::ScalarType to = dtype_named(dtype);
  const Tensor rows = as_rows(x).contiguous();
  const int64_t tokens = rows.size(0);
  if (tokens == 0 || weight.size(0) == 0) {
    return with_leading_of(x, at::empty({tokens, weight.size(0)}, rows.options().dtype(to)));
  }
  if (tokens <= kMostTokens) {
    const Tensor logits = logits_of(rows, weight.contiguous(), norm, contiguous(bias), to, factor);
    return with_leading_of(x, logits);
  }
  Tensor normed = rows;
  if (norm && rows.numel() > 0) {
    Commands commands;
    normed = add_norm(commands, rows, *norm);
    commands.encode();
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const OptionalTensor shift = bias ? OptionalTensor(bias->to(at::kFloat)) : std::nullopt;
  normed = normed.to(at::kFloat);
  if (factor != 1.0) normed = normed.mul(factor);
  return with_leading_of(x, at::linear(normed, weight.to(at::kFloat), shift).to(to));
}

Routing moe_gate(const Tensor& hidden, const Tensor& router_weight, const Tensor& norm_weight,
                 const Tensor& per_expert_scale, int64_t top_k, double eps, bool renormalize_after_scale,
                 std::string_view ids_dtype) {
  const Tensor rows = as_rows(hidden).contiguous();
  if (rows.size(0) == 0) {
    return in_ids_dtype(empty_routing(hidden, hidden.sizes().slice(0, hidden.dim() - 1), top_k), ids_dtype);
  }
  const Tensor logits = logits_of(rows, router_weight.contiguous(), input_norm(norm_weight, eps, 0.0),
                                  std::nullopt, at::kFloat);
  RouterParams params = plain_router(SCORING_SOFTMAX_AFTER_TOPK, top_k);
  params.normalise_scaled = renormalize_after_scale;
  return in_ids_dtype(
      route(router_with(with_leading_of(hidden, logits), std::nullopt, per_expert_scale, params)), ids_dtype);
}

}  // namespace

Router router_of(const Tensor& logits, int64_t top_k, std::string_view scoring, const OptionalTensor& bias,
                 int64_t num_groups, int64_t top_groups, std::string_view group_score,
                 std::optional<double> masked_score, bool bias_on_logits, bool norm_topk_prob, double sum_eps,
                 double sum_min, double scaling_factor, const OptionalTensor& per_expert_scale) {
  RouterParams params = plain_router(scoring_code(scoring), top_k);
  params.bias_on_logits = bias_on_logits;
  params.groups = num_groups;
  params.top_groups = top_groups;
  params.group_score_is_max = group_score == "max";
  params.has_masked_score = masked_score.has_value();
  params.masked_score = static_cast<float>(masked_score.value_or(0.0));
  params.scaling_factor = static_cast<float>(scaling_factor);
  if (norm_topk_prob) set_normalisation(params, sum_eps, sum_min);
  return router_with(logits, bias, per_expert_scale, params);
}

Routing empty_routing(const Router& router) {
  return empty_routing(router.logits, router.logits.sizes().slice(0, router.logits.dim() - 1),
                       router.params.top_k);
}

std::vector<Library> routing_libraries(c10::ScalarType dtype) {
  std::vector<Library> all;
  for (int64_t count = kLeastExperts; count <= kMostExperts; count *= 2)
    all.push_back(routing_library(count, dtype));
  return all;
}

Routing route(const Router& router) {
  // From this many rows, the GPU is full, and threadgroups of one simdgroup cost more than larger ones. Not
  // measured.
  constexpr int64_t kManyRows = 256;
  const Routing result = empty_routing(router);
  const auto& [weights, ids] = result;
  if (weights.numel() == 0) return result;
  const Tensor& logits = router.logits;
  const int64_t rows = router.params.rows, rows_per_group = rows < kManyRows ? 1 : 4;
  const int64_t of_lane = experts_per_lane(logits.size(-1));
  Commands commands;
  commands.add(routing_library(of_lane, logits.scalar_type()), "route" + std::to_string(of_lane), logits)
      .bind(logits, router.bias, router.scale, weights, ids)
      .params(router.params)
      .threadgroups({ceil_div(rows, rows_per_group)}, {rows_per_group * kSimdWidth});
  commands.encode();
  return result;
}

MOE_OPERATOR(moe_router)
MOE_OPERATOR(moe_router_topk_softmax)
MOE_OPERATOR(fused_moe_routing)
MOE_OPERATOR(router_logits)
MOE_OPERATOR(moe_gate)

}  // namespace moe_mps
