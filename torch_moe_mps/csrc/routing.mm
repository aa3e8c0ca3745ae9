#include "routing.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>

#include "../shaders/params.h"
#include "kernel_names.h"
#include "rows.h"
#include "signature.h"

namespace moe_mps {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Routing = std::tuple<Tensor, Tensor>;  // weights, ids

constexpr int64_t kThreadgroupFloats = 32768 / 4;
// The smallest normal float16: the floor of the sum in moe_router_topk_softmax.
constexpr double kSoftmaxNormMin = 6.103515625e-05;

Routing empty_routing(const Tensor& like, at::IntArrayRef leading, int64_t top_k) {
  auto shape = leading.vec();
  shape.push_back(top_k);
  return {at::empty(shape, like.options().dtype(at::kFloat)),
          at::empty(shape, like.options().dtype(at::kInt))};
}

// moe_router and its special cases

uint32_t scoring_code(std::string_view scoring) {
  if (scoring == "softmax") return SCORING_SOFTMAX;
  if (scoring == "sigmoid") return SCORING_SIGMOID;
  if (scoring == "sqrtsoftplus") return SCORING_SQRTSOFTPLUS;
  TORCH_CHECK(scoring == "softmax_after_topk", "moe_mps: no kernel for scoring ", scoring);
  return SCORING_SOFTMAX_AFTER_TOPK;
}

// What is the same for every router: one group, no bias, no scale.
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
  params.norm_eps = static_cast<float>(eps);
  params.norm_min = minimum > 0.0 ? static_cast<float>(minimum) : -std::numeric_limits<float>::infinity();
}

// The experts that a lane of the kernel holds.
int64_t experts_per_lane(int64_t experts) {
  int64_t count = 2;
  while (count * kSimdWidth < experts) count *= 2;
  return count;
}

Routing route(const Tensor& logits_, const OptionalTensor& bias_, const OptionalTensor& scale_,
              RouterParams params) {
  constexpr int64_t kManyRows =
      256;  // from here on the GPU is full, and threadgroups of one simdgroup cost more
  const Tensor logits = logits_.contiguous();
  const OptionalTensor bias = contiguous(bias_), scale = contiguous(scale_);
  const Routing result = empty_routing(logits, logits.sizes().slice(0, logits.dim() - 1), params.top_k);
  const auto& [weights, ids] = result;
  if (weights.numel() == 0) return result;
  const int64_t experts = logits.size(-1);
  const int64_t rows = logits.numel() / experts;
  params.rows = rows;
  params.experts = experts;
  params.vectorised = rows_start_aligned(experts, {logits});
  params.has_bias = bias.has_value();
  params.bias_dtype = bias ? dtype_code(*bias) : DTYPE_FLOAT;
  params.has_scale = scale.has_value();
  params.scale_dtype = scale ? dtype_code(*scale) : DTYPE_FLOAT;

  const int64_t rows_per_group = rows < kManyRows ? 1 : 4;
  Commands commands;
  commands.add("routing", kernel_name("route", {logits.scalar_type(), experts_per_lane(experts)}))
      .bind(logits)
      .bind_or(bias, logits)
      .bind_or(scale, logits)
      .bind(weights)
      .bind(ids)
      .params(params)
      .threadgroups({NSUInteger(ceil_div(rows, rows_per_group))}, {NSUInteger(rows_per_group * kSimdWidth)});
  commands.encode();
  return result;
}

Routing moe_router(const Tensor& logits, int64_t top_k, std::string_view scoring, const OptionalTensor& bias,
                   int64_t num_groups, int64_t top_groups, std::string_view group_score,
                   std::optional<double> masked_score, bool bias_on_logits, bool norm_topk_prob,
                   double norm_eps, double norm_min, double scaling_factor,
                   const OptionalTensor& per_expert_scale) {
  check_call("moe_router", logits, top_k, scoring, bias, num_groups, top_groups, group_score, masked_score,
             bias_on_logits, norm_topk_prob, norm_eps, norm_min, scaling_factor, per_expert_scale);
  RouterParams params = plain_router(scoring_code(scoring), top_k);
  params.bias_on_logits = bias_on_logits;
  params.groups = num_groups;
  params.top_groups = top_groups;
  params.group_score_is_max = group_score == "max";
  params.has_masked_score = masked_score.has_value();
  params.masked_score = static_cast<float>(masked_score.value_or(0.0));
  params.scaling_factor = static_cast<float>(scaling_factor);
  if (norm_topk_prob) set_normalisation(params, norm_eps, norm_min);
  return route(logits, bias, per_expert_scale, params);
}

Routing moe_router_topk_softmax(const Tensor& logits, int64_t top_k, bool norm_topk_prob) {
  check_call("moe_router_topk_softmax", logits, top_k, norm_topk_prob);
  RouterParams params = plain_router(SCORING_SOFTMAX, top_k);
  if (norm_topk_prob) set_normalisation(params, 0.0, kSoftmaxNormMin);
  return route(logits, std::nullopt, std::nullopt, params);
}

Routing fused_moe_routing(const Tensor& logits, const Tensor& per_expert_scale, int64_t top_k) {
  check_call("fused_moe_routing", logits, per_expert_scale, top_k);
  return route(logits, std::nullopt, per_expert_scale, plain_router(SCORING_SOFTMAX_AFTER_TOPK, top_k));
}

// moe_gate

struct GateLayout {
  int64_t tokens_per_group;
  int64_t threads;
  int64_t tile_width;
};

GateLayout gate_layout(int64_t tokens, int64_t experts, int64_t width) {
  // More tokens a threadgroup read the router fewer times, fewer keep more of the GPU busy.
  constexpr int64_t kAlone = 64, kMany = 1024;
  constexpr int64_t kColumns = 128;       // a tile is a multiple of what a simdgroup reads at once
  constexpr int64_t kStaticFloats = 128;  // declared in the kernel, and room for what a compiler adds
  const auto fits = [&](int64_t tokens_per_group) {
    return (kThreadgroupFloats - kStaticFloats) / tokens_per_group - experts;
  };
  GateLayout layout{1, 1024, fits(1)};
  if (tokens > kAlone) layout = {4, 512, std::min<int64_t>(fits(4), 1024)};
  if (tokens >= kMany && fits(16) >= kColumns) layout = {16, 512, std::min<int64_t>(fits(16), 256)};
  layout.tile_width = std::min(layout.tile_width, ceil_div(width, kColumns) * kColumns) / kColumns * kColumns;
  return layout;
}

Routing moe_gate(const Tensor& hidden_, const Tensor& router_weight_, const Tensor& norm_weight_,
                 const Tensor& per_expert_scale_, int64_t top_k, double eps, bool renormalize_after_scale) {
  check_call("moe_gate", hidden_, router_weight_, norm_weight_, per_expert_scale_, top_k, eps,
             renormalize_after_scale);
  const Tensor hidden = hidden_.contiguous(), router = router_weight_.contiguous();
  const Tensor norm_weight = norm_weight_.contiguous(), per_expert_scale = per_expert_scale_.contiguous();
  const int64_t tokens = hidden.size(0), width = hidden.size(1), experts = router.size(0);
  const Routing result = empty_routing(hidden, {tokens}, top_k);
  const auto& [weights, ids] = result;
  if (weights.numel() == 0) return result;
  const GateLayout layout = gate_layout(tokens, experts, width);
  GateParams params{};
  params.tokens = tokens;
  params.experts = experts;
  params.width = width;
  params.top_k = top_k;
  params.tile_width = layout.tile_width;
  params.vectorised = rows_start_aligned(width, {hidden, router, norm_weight});
  params.hidden_dtype = dtype_code(hidden);
  params.norm_dtype = dtype_code(norm_weight);
  params.scale_dtype = dtype_code(per_expert_scale);
  params.renormalise = renormalize_after_scale;
  params.eps = static_cast<float>(eps);

  const Tensor& stand_in = per_expert_scale;  // a width of 0 leaves nothing else to bind
  Commands commands;
  commands.add("routing", kernel_name("gate", {router.scalar_type(), layout.tokens_per_group}))
      .bind(width > 0 ? hidden : stand_in)
      .bind(width > 0 ? router : stand_in)
      .bind(width > 0 ? norm_weight : stand_in)
      .bind(per_expert_scale)
      .bind(weights)
      .bind(ids)
      .params(params)
      .threadgroup_memory(layout.tokens_per_group * (layout.tile_width + experts) * sizeof(float))
      .threadgroups({NSUInteger(ceil_div(tokens, layout.tokens_per_group))}, {NSUInteger(layout.threads)});
  commands.encode();
  return result;
}

// Sorting by expert

int64_t binary_digits(int64_t value) {
  int64_t digits = 0;
  for (; value > 0; value >>= 1) ++digits;
  return digits;
}

Routing moe_bucket(const Tensor& ids_, int64_t num_experts) {
  check_call("moe_bucket", ids_, num_experts);
  const Tensor ids = ids_.contiguous();
  const auto options = ids.options().dtype(at::kInt);
  Tensor pair_order = at::empty({ids.numel()}, options);
  Tensor offsets = at::empty({num_experts + 1}, options);
  Commands commands;
  add_bucket(commands, ids, num_experts, pair_order, offsets);
  commands.encode();
  return {pair_order, offsets};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_compute_ids_tpe(const Tensor& ids_, int64_t num_experts,
                                                               int64_t gate_up_rows, int64_t down_rows) {
  check_call("moe_compute_ids_tpe", ids_, num_experts, gate_up_rows, down_rows);
  constexpr int64_t kRowsPerTile = 64;
  const Tensor ids = ids_.contiguous();
  const int64_t pairs = ids.numel();
  const auto options = ids.options().dtype(at::kInt);
  Tensor tpe = at::empty({num_experts}, options);
  Tensor lists = at::empty({num_experts, pairs}, options);
  Tensor gate_up_args = at::empty({3}, options);
  Tensor down_args = at::empty({3}, options);
  IdsTpeParams params{};
  params.pairs = pairs;
  params.experts = num_experts;
  params.gate_up_tiles = ceil_div(gate_up_rows, kRowsPerTile);
  params.down_tiles = ceil_div(down_rows, kRowsPerTile);
  const int64_t threads = std::clamp(ceil_div(pairs, kSimdWidth) * kSimdWidth, kSimdWidth, kMaxThreads);
  Commands commands;
  commands.add("routing", kernel_name("ids_by_expert", {ids.scalar_type()}))
      .bind(pairs > 0 ? ids : tpe)
      .bind(tpe)
      .bind(pairs > 0 ? lists : tpe)
      .bind(gate_up_args)
      .bind(down_args)
      .params(params)
      .threadgroup_memory((num_experts + 1) * sizeof(uint32_t))
      .threadgroups({NSUInteger(num_experts + 1)}, {NSUInteger(threads)});
  commands.encode();
  return {tpe, lists, gate_up_args, down_args};
}

}  // namespace

int64_t max_tiles(int64_t pairs, int64_t num_experts, int64_t tile_rows) {
  return std::max<int64_t>(1, std::min(pairs, num_experts + 1) + pairs / tile_rows);
}

void add_bucket(Commands& commands, const Tensor& ids, int64_t num_experts, const Tensor& pair_order,
                const Tensor& offsets, const std::optional<TileList>& tiles) {
  // Every threadgroup counts all pairs, so more of them share the scattered writes but repeat the counting.
  // 32768 pairs on an H200: one threadgroup 36 us, 16 of them 9 us.
  constexpr int64_t kPairsPerGroup = 2048, kMaxGroups = 16;
  constexpr int64_t kPairsPerChunk = 64;  // fewer are not worth another row of counters
  constexpr int64_t kStaticWords = 128;   // declared in the kernel, and room for what a compiler adds
  constexpr int64_t kSimdgroups = kMaxThreads / kSimdWidth;
  const int64_t pairs = ids.numel();
  const int64_t buckets = num_experts + 1;
  const int64_t most = (kThreadgroupFloats - kStaticWords - 2 * buckets) / (buckets + kLaneSets);
  const int64_t groups = std::clamp<int64_t>(ceil_div(pairs, kPairsPerGroup), 1, kMaxGroups);
  const int64_t run = ceil_div(pairs, groups);
  const int64_t chunks = std::clamp<int64_t>(ceil_div(run, kPairsPerChunk), 1, std::min(kSimdgroups, most));
  // Simdgroups without a chunk still count and scan.
  const int64_t simdgroups = std::max(chunks, std::min(kSimdgroups, ceil_div(buckets, kSimdWidth)));
  BucketParams params{};
  params.pairs = pairs;
  params.experts = num_experts;
  params.chunks = chunks;
  params.chunk = ceil_div(ceil_div(run, chunks), kSimdWidth) * kSimdWidth;
  params.upper_digits = binary_digits(num_experts / kLaneSets);
  if (tiles) {
    params.tile_rows = tiles->tile_rows;
    params.sentinel_tiles = tiles->sentinel_tiles;
    params.columns_a = tiles->columns_a;
    params.columns_b = tiles->columns_b;
  }
  commands.add("routing", kernel_name("bucket_pairs", {ids.scalar_type()}))
      .bind(pairs > 0 ? ids : offsets)
      .bind(pairs > 0 ? pair_order : offsets)
      .bind(offsets)
      .bind(tiles ? tiles->tiles : offsets)
      .bind(tiles ? tiles->grids : offsets)
      .params(params)
      .threadgroup_memory((2 * buckets + chunks * (buckets + kLaneSets)) * sizeof(uint32_t))
      .threadgroups({NSUInteger(groups)}, {NSUInteger(simdgroups * kSimdWidth)});
}

}  // namespace moe_mps

TORCH_LIBRARY_IMPL(moe_mps, MPS, m) {
  m.impl("moe_router", moe_mps::moe_router);
  m.impl("moe_router_topk_softmax", moe_mps::moe_router_topk_softmax);
  m.impl("fused_moe_routing", moe_mps::fused_moe_routing);
  m.impl("moe_gate", moe_mps::moe_gate);
  m.impl("moe_bucket", moe_mps::moe_bucket);
  m.impl("moe_compute_ids_tpe", moe_mps::moe_compute_ids_tpe);
}

TORCH_LIBRARY_IMPL(moe_mps, AutogradMPS, m) {
  for (const char* name : {"moe_router", "moe_router_topk_softmax", "fused_moe_routing", "moe_gate",
                           "moe_bucket", "moe_compute_ids_tpe"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
