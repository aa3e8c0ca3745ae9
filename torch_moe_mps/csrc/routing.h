// Routers, for the kernels that choose experts.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "../shaders/params.h"
#include "groups.h"
#include "metal/encoder.h"
#include "metal/library.h"

namespace moe_mps {

using Routing = std::tuple<at::Tensor, at::Tensor>;  // weights, ids

// Arguments that choose the experts of each row of logits. All are contiguous.
struct Router {
  at::Tensor logits;
  OptionalTensor bias, scale;
  RouterParams params;
};

// The arguments of moe_router.
Router router_of(const at::Tensor& logits, int64_t top_k, std::string_view scoring,
                 const OptionalTensor& bias, int64_t num_groups, int64_t top_groups,
                 std::string_view group_score, std::optional<double> masked_score, bool bias_on_logits,
                 bool norm_topk_prob, double sum_eps, double sum_min, double scaling_factor,
                 const OptionalTensor& per_expert_scale);
template <>
struct GroupOf<Router> : MadeBy<router_of> {};

// shaders/routing.metal for each number of experts of a lane.
std::vector<Library> routing_libraries(c10::ScalarType dtype);

// Memory for what a router chooses.
Routing empty_routing(const Router& router);

Routing route(const Router& router);

}  // namespace moe_mps
