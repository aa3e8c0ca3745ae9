#include <ATen/core/Tensor.h>

#include <algorithm>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

void _pool_window_(const Tensor& kv_, const Tensor& gate_, const Tensor& position_bias_, const Tensor& state_,
                   const Tensor& entries_, int64_t position, const Tensor& norm_weight_,
                   const Tensor& inv_freq_, double scaling, double eps) {
  if (kv_.numel() == 0) return;
  const Tensor kv = rows_contiguous(kv_), gate = rows_contiguous(gate_), state = state_.contiguous();
  const Tensor entries = rows_contiguous(entries_), position_bias = position_bias_.contiguous();
  const Tensor norm_weight = norm_weight_.contiguous(), inv_freq = inv_freq_.contiguous();
  PoolParams params{};
  params.kv = token_strides(kv);
  params.gate = token_strides(gate);
  params.entries = token_strides(entries);
  params.tokens = kv.size(1);
  params.position = position;
  params.rate = position_bias.size(0);
  params.rows = state.size(1);
  params.columns = kv.size(2);
  params.width = entries.size(2);
  params.turning = inv_freq.size(0);
  params.freq_dtype = dtype_code(inv_freq);
  params.bias_dtype = dtype_code(position_bias);
  params.weight_dtype = dtype_code(norm_weight);
  params.scaling = static_cast<float>(scaling);
  params.eps = static_cast<float>(eps);

  // The parts depend on nothing that a cut of the prompt changes: sums have the same bits.
  const int64_t part_threads = ceil_div(params.width, 2 * kSimdWidth) * kSimdWidth;
  params.parts = std::clamp<int64_t>(params.rate / kPoolTokens, 1, kPoolThreads / part_threads);
  const int64_t closed = (position + params.tokens) / params.rate - position / params.rate;
  const int64_t groups = std::max<int64_t>(1, closed - (params.columns > params.width));
  Commands commands;
  commands.add({"pooling", kv.scalar_type()}, "pool_windows")
      .bind_strided(kv, gate)
      .bind(position_bias, state)
      .bind_strided(entries.numel() > 0 ? entries : state)
      .bind(norm_weight, params.turning > 0 ? inv_freq : norm_weight)
      .params(params)
      .threadgroups({groups, kv.size(0)}, {params.parts * part_threads});
  commands.encode();
  if (!state.is_same(state_)) state_.copy_(state);
  if (!entries.is_same(entries_)) entries_.copy_(entries);
}

}  // namespace

MOE_OPERATOR(_pool_window_)

}  // namespace moe_mps
