// The first matmul of one token's experts, which its logits choose.
#pragma once
#include "matmul/rows.h"
#include "router.h"
// Behind those.
#include "params/chosen.h"

// matmul_rows for the experts that one token's logits choose. Every simdgroup chooses for itself: that costs
// less than a launch. The first one writes what the down projection reads. A pair behind those is of the
// shared expert. The weight of a norm is in S.
template <typename W, int R, int N, bool kNormed, typename S>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows_chosen(
    device const typename W::Element* x [[buffer(0)]], device const uchar* packed [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device int* ids [[buffer(4)]], device const uchar* bias [[buffer(5)]],
    device typename W::Element* out [[buffer(6)]], device const uchar* logits [[buffer(7)]],
    device const uchar* correction_bias [[buffer(8)]], device const uchar* per_expert_scale [[buffer(9)]],
    device float* weights [[buffer(10)]], constant ChosenParams& params [[buffer(11)]],
    device const S* norm_weight [[buffer(12)]], device const uchar* shared_packed [[buffer(13)]],
    device const uchar* shared_scales [[buffer(14)]], device const uchar* shared_biases [[buffer(15)]],
    uint2 group [[threadgroup_position_in_grid]], LANES, uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  const RouterParams router = params.router;
  RowsPlace place = rows_place(group, lane, simdgroup, simdgroups, false);
  if (group.y < router.top_k) {
    Values<N> values;
    if (router.wide_logits != 0) {
      values = load_logits<N>(reinterpret_cast<device const float*>(logits), router, lane);
    } else {
      values = load_logits<N>(reinterpret_cast<device const T*>(logits), router, lane);
    }
    const bool writes = group.x == 0 && group.y == 0 && simdgroup == 0;
    const bool weighs = writes || params.weights_on_inputs != 0;
    const Choice<N> choice =
        choice_of<N>(values, correction_bias, router, weighs ? router.top_k : group.y + 1, lane);
    if (weighs) {
      Values<N> of_experts = choice.weights(per_expert_scale, router, lane);
      if (params.weights_on_inputs != 0) {
        place.factor = choice.of_slot(of_experts, group.y);
        UNROLL for (int j = 0; j < N; ++j) of_experts.v[j] = 1.0f;
      }
      if (writes) store_chosen<N>(choice.keys, of_experts, lane, weights, ids);
    }
    place.expert = choice.expert_of(group.y, lane);
  } else {
    packed = shared_packed;
    scales = shared_scales;
    biases = shared_biases;
  }
  const Outputs<T, true> outputs = {bias, x, out, ids};
  if constexpr (kNormed) {
    if (params.norms_inputs != 0) {
      rows_of_pair<W, R>(x, packed, scales, biases, InputNorm<S>{norm_weight}, outputs, place, nullptr,
                         params.matmul);
      return;
    }
  }
  rows_of_pair<W, R>(x, packed, scales, biases, NoNorm{}, outputs, place, nullptr, params.matmul);
}
