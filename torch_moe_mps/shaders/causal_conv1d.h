// Causal depthwise convolution with a state
#pragma once
#include "common/activations.h"
#include "common/any_stores.h"
#include "common/dtypes.h"
#include "common/pending.h"
#include "geometry/causal_conv1d.h"
#include "params/causal_conv1d.h"

// Positions of a channel: those of the state, those that are pending, and those of the input.
template <typename T>
struct ConvPositions {
  device const uchar* state;
  ulong state_start;
  device const T* pending;
  uint end;  // of those that are pending
  device const T* x;
  ulong x_start;

  float value(uint position, constant ConvParams& params) const {
    if (position >= end) return float(x[x_start + (position - end) * params.x.token]);
    if (position >= params.length) return float(pending[position - params.length]);
    return load_one(state, params.state_dtype, state_start + position);
  }
};

// A thread takes some results of a channel. Only those of the first ones read the state: they read it for
// all sums before they write the new one, in ascending order, so that a position is read before it is
// overwritten. Grid: (channels, results, batch).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kConvThreads)]] void conv_channels(
    device const T* x [[buffer(0)]], device uchar* state [[buffer(1)]],
    device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
    device T* output [[buffer(4)]], device T* pending [[buffer(5)]], device const int* counts [[buffer(6)]],
    constant ConvParams& params [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint channel = group.x * kConvThreads + thread_index;
  if (channel >= params.channels) return;
  const ulong x_start = group.z * params.x.batch + channel * params.x.head;
  const ulong state_start = (ulong(group.z) * params.channels + channel) * params.length;
  const uint start = group.y * params.thread_results, end = min(start + params.thread_results, params.tokens);
  pending += (ulong(group.z) * params.channels + channel) * params.pending;
  const uint count = count_of(counts, params.pending, group.z);
  const ConvPositions<T> every = {state, state_start, pending, params.length + count, x, x_start};
  for (uint result = start; result < end; ++result) {
    float sum = params.has_bias != 0 ? load_one(bias, params.bias_dtype, channel) : 0.0f;
    const uint first = every.end + result + 1 - params.width;
    for (uint i = 0; i < params.width; ++i) {
      const float factor = load_one(weight, params.weight_dtype, ulong(channel) * params.width + i);
      sum = fma(factor, every.value(first + i, params), sum);
    }
    const ulong place = (ulong(group.z) * params.tokens + result) * params.channels + channel;
    if (params.silu != 0) sum = silu(sum);
    if (params.add_input != 0) sum += float(x[x_start + result * params.x.token]);
    output[place] = T(sum);
  }
  if (start != 0) return;
  const uint taken = params.keep != 0 ? count : count + params.tokens;
  for (uint i = 0; i < params.length; ++i) {
    store_any(state, params.state_dtype, state_start + i, every.value(taken + i, params));
  }
  if (params.keep == 0) return;
  for (uint token = 0; token < params.tokens; ++token) pending[token] = x[x_start + token * params.x.token];
}
