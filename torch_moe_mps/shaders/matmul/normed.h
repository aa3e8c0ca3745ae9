// The first matmul of one token's experts, or any single matmul, with an RMSNorm in front.
#pragma once
#include "matmul/rows.h"

// matmul_rows for inputs that are normed, by a weight in N. Every simdgroup sums the squares of its inputs
// for itself: for one token that costs less than a launch, because memory limits the kernel.
template <typename W, int R, typename N>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void matmul_rows_normed(
    MATMUL_BUFFERS(typename W::Element), device const N* norm_weight [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]], LANES, uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[kFewSimdgroups * SharedSums<R>::kSize];
  const InputNorm<N> norm = {norm_weight};
  const Outputs<typename W::Element> outputs = {bias, residual, out, ids};
  RowsPlace place = rows_place(group, lane, simdgroup, simdgroups, params.shares_inputs != 0);
  place.expert = expert_of_pair(ids, group.y, params);
  rows_of_pair<W, R>(x, packed, scales, biases, norm, outputs, place, sums, params);
}

// For norms with a weight in the dtype of the inputs and, beside 16 bits, in float32.
#define INSTANTIATE_NARROW_NORMED() \
  INSTANTIATE("matmul_rows_normed", matmul_rows_normed<Weights, kSingleRows, Weights::Element>)
#ifdef MOE_NORMS_APART
#define INSTANTIATE_NORMED()
#elif defined(MOE_WIDE_NORMS)
#define INSTANTIATE_NORMED()  \
  INSTANTIATE_NARROW_NORMED() \
  INSTANTIATE("matmul_rows_normed_wide", matmul_rows_normed<Weights, kSingleRows, float>)
#else
#define INSTANTIATE_NORMED() INSTANTIATE_NARROW_NORMED()
#endif
