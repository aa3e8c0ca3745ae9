// Mamba-1's selective scan
#pragma once
#include "common/any_rows.h"
#include "common/pending.h"
#include "common/simdgroups.h"
#include "geometry/selective_scan.h"
#include "params/selective_scan.h"

// Values of a channel for some tokens.
template <typename T, uint kTokens>
struct ChannelTokens {
  T x[kTokens], step[kTokens], gate[kTokens];
};

// A channel's places in the rows of a token.
template <typename T>
struct ChannelRows {
  device const T *x, *step, *gate;

  // Tokens from number `first` after that one on.
  template <uint kTokens>
  ChannelTokens<T, kTokens> load(uint first, constant SelectiveScanParams& params) const {
    ChannelTokens<T, kTokens> tokens;
    UNROLL for (uint i = 0; i < kTokens; ++i) {
      tokens.x[i] = x[(first + i) * params.x.token];
      tokens.step[i] = step[(first + i) * params.step.token];
      tokens.gate[i] = gate[(first + i) * params.gate.token];
    }
    return tokens;
  }
  void advance(uint tokens, constant SelectiveScanParams& params) {
    x += tokens * params.x.token;
    step += tokens * params.step.token;
    gate += tokens * params.gate.token;
  }
};

// Half of B and of C of a token.
struct StagedToken {
  float4 b[kSelectiveStates / 8];  // times ln(2)
  float4 c[kSelectiveStates / 8];
};

// Half of the states of two neighbouring channels, the lane's own and the next lane's, whose lane has the
// other halves.
struct ChannelStates {
  float rates[2][kSelectiveStates / 2];
  float kept[2][kSelectiveStates / 2];

  // States of a channel. `left` is how many there are from the lane's first on.
  template <bool kWhole>
  void load(uint channel, device const uchar* a_log, ulong first, device const float* state, int left,
            constant SelectiveScanParams& params) {
    Pack<kSelectiveStates / 2> logs;
    if constexpr (kWhole) logs = load_row<kSelectiveStates / 2>(a_log, params.a_log_dtype, first);
    UNROLL for (int n = 0; n < int(kSelectiveStates) / 2; ++n) {
      if constexpr (!kWhole) logs.v[n] = n < left ? load_one(a_log, params.a_log_dtype, first + n) : 0.0f;
      rates[channel][n] = -precise::exp(logs.v[n]);
      kept[channel][n] = kWhole || n < left ? state[n * params.state.head] : 0.0f;
    }
  }
  template <bool kWhole>
  void store(uint channel, device float* state, int left, constant SelectiveScanParams& params) const {
    UNROLL for (int n = 0; n < int(kSelectiveStates) / 2; ++n) {
      if (kWhole || n < left) state[n * params.state.head] = kept[channel][n];
    }
  }
  void store(uint place, device float* state, constant SelectiveScanParams& params) const;

  // Step of a token for both channels; `octaves` is the own one's step, times log2(e), as exp2 takes an
  // instruction less than exp. Returns: the own one's C . state.
  float take(float octaves, float x, threadgroup const StagedToken& token) {
    const float written = octaves * x;
    const float other_octaves = simd_shuffle_xor(octaves, ushort(1));
    const float other_written = simd_shuffle_xor(written, ushort(1));
    const float other_sum = take(1, other_octaves, other_written, token, 0.0f);
    return take(0, octaves, written, token, simd_shuffle_xor(other_sum, ushort(1)));
  }
  float take(uint channel, float octaves, float written, threadgroup const StagedToken& token, float sum) {
    UNROLL for (uint j = 0; j < kSelectiveStates / 8; ++j) {
      const float4 b = token.b[j], c = token.c[j];
      UNROLL for (uint i = 0; i < 4; ++i) {
        const uint n = 4 * j + i;
        const float decay = precise::exp2(rates[channel][n] * octaves);
        kept[channel][n] = fma(kept[channel][n], decay, written * b[i]);
        sum = fma(kept[channel][n], c[i], sum);
      }
    }
    return sum;
  }
};

// Half of the states of a channel, those from number `first` on: where they start, and how many there are.
struct HalfOfChannel {
  uint channel, first;
  ulong start;
  int left;
};

// Input of the lane's own channel, or with `other` 1 of that of the lane beside it. Past the last channel the
// last one is read again, and nothing is left to store.
inline HalfOfChannel half_of(uint place, uint other, constant SelectiveScanParams& params) {
  constexpr uint kHalf = kSelectiveStates / 2;
  const uint channel = min(place ^ other, params.channels - 1), first = kHalf * (place % 2);
  return {channel, first, channel * params.state.token + first * params.state.head,
          (place ^ other) < params.channels ? int(params.states) - int(first) : 0};
}

inline void ChannelStates::store(uint place, device float* state,
                                 constant SelectiveScanParams& params) const {
  const uint same = anew(place, place % kSimdWidth);
  UNROLL for (uint i = 0; i < 2; ++i) {
    const HalfOfChannel of_lane = half_of(same, i, params);
    if (of_lane.left >= int(kSelectiveStates) / 2) {
      store<true>(i, state + of_lane.start, of_lane.left, params);
    } else {
      store<false>(i, state + of_lane.start, of_lane.left, params);
    }
  }
}

// softplus with logarithms and powers of 2: log2(1 + exp2(x)).
inline float softplus_in_octaves(float x) {
  const float y = precise::exp2(-fabs(x)), u = 1.0f + y;
  return max(x, 0.0f) + fma(y - (u - 1.0f), M_LOG2E_F, precise::log2(u));
}

// Takes tokens in, and writes their results from the place of token number `first` on.
template <uint kTokens, typename T>
inline void scan_tokens(thread ChannelStates& states, ChannelTokens<T, kTokens> tokens, uint first,
                        threadgroup const StagedToken* staged, float shift, float skip, device T* results,
                        bool is_channel, constant SelectiveScanParams& params) {
  float sums[kTokens];
  UNROLL for (uint i = 0; i < kTokens; ++i) {
    const float x = float(tokens.x[i]);
    const float octaves = softplus_in_octaves(fma(float(tokens.step[i]), M_LOG2E_F, shift));
    sums[i] = fma(skip, x, states.take(octaves, x, staged[first + i]));
  }
  if (params.has_gate != 0) {
    UNROLL for (uint i = 0; i < kTokens; ++i) {
      const float gate = float(tokens.gate[i]);
      sums[i] = sums[i] * gate / (1.0f + precise::exp(-gate));
    }
  }
  if (is_channel) {
    UNROLL for (uint i = 0; i < kTokens; ++i) results[(first + i) * params.channels] = T(sums[i]);
  }
}

// Inputs of a group's tokens that are pending, one behind the other: x of its channels, their octaves, and B.
struct PendingScan {
  device float* rows;
  uint width;

  PendingScan(device float* pending, ulong group, constant SelectiveScanParams& params) {
    width = 2 * kSelectiveThreads + params.states;
    rows = pending + group * params.pending * width;
  }

  // Takes the first tokens in. `staged` has room for them.
  void take_in(thread ChannelStates& states, uint tokens,
               threadgroup StagedToken (&staged)[2][kSelectiveTokens], uint thread_index,
               constant SelectiveScanParams& params) const {
    constexpr uint kHalf = kSelectiveStates / 2;
    for (uint i = thread_index; i < tokens * kSelectiveStates; i += kSelectiveThreads) {
      const uint t = i / kSelectiveStates, n = i % kSelectiveStates;
      threadgroup float* target = reinterpret_cast<threadgroup float*>(&staged[n / kHalf][t]) + n % kHalf;
      target[0] = n < params.states ? M_LN2_F * rows[t * width + 2 * kSelectiveThreads + n] : 0.0f;
      target[kHalf] = 0.0f;  // of a result, which nothing reads
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = 0; t < tokens; ++t) {
      device const float* own = rows + t * width + thread_index;
      states.take(own[kSelectiveThreads], own[0], staged[thread_index % 2][t]);
    }
  }

  // Keeps tokens of a channel, and a part of B.
  template <typename T>
  void keep(device const T* x, device const T* step, device const T* b, float shift, bool is_channel,
            uint thread_index, constant SelectiveScanParams& params) const {
    for (uint t = 0; t < params.tokens; ++t) {
      device float* own = rows + t * width;
      if (is_channel) {
        const float octaves = fma(float(step[t * params.step.token]), M_LOG2E_F, shift);
        own[thread_index] = float(x[t * params.x.token]);
        own[kSelectiveThreads + thread_index] = softplus_in_octaves(octaves);
      }
      if (thread_index < params.states) {
        own[2 * kSelectiveThreads + thread_index] =
            float(b[t * params.b.token + thread_index * params.b.head]);
      }
    }
  }
};

// Mamba-1. Two neighbouring lanes keep the states of two channels in registers for all tokens: a lane has
// half of the states of both, so that it reads B and C of a token once for two channels, and computes the
// step, the gate and the result of one. A threadgroup stages B and C of some tokens at a time. Tokens that
// are pending it takes in first; each group of channels has their B for itself, and reads it before it keeps
// that of this call in its place. Grid: (channels, batch).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSelectiveThreads)]] void selective_scan(
    device const T* x [[buffer(0)]], device const T* step [[buffer(1)]], device const T* b [[buffer(2)]],
    device const T* c [[buffer(3)]], device const uchar* a_log [[buffer(4)]],
    device const uchar* dt_bias [[buffer(5)]], device const uchar* skip [[buffer(6)]],
    device const T* gate [[buffer(7)]], device float* state [[buffer(8)]], device T* output [[buffer(9)]],
    device float* pending [[buffer(10)]], device const int* counts [[buffer(11)]],
    constant SelectiveScanParams& params [[buffer(12)]], uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kHalf = kSelectiveStates / 2, kUnroll = kSelectiveUnroll;
  threadgroup StagedToken staged[2][kSelectiveTokens];
  const uint place = group.x * kSelectiveThreads + thread_index, part = thread_index % 2;
  const bool is_channel = place < params.channels;
  const uint channel = min(place, params.channels - 1);
  const ulong batch = group.y;
  ChannelRows<T> rows = {x + batch * params.x.batch + channel * params.x.head,
                         step + batch * params.step.batch + channel * params.step.head,
                         gate + batch * params.gate.batch + channel * params.gate.head};
  device T* results = output + batch * params.tokens * params.channels + channel;
  const float factor = params.has_skip != 0 ? load_one(skip, params.skip_dtype, channel) : 0.0f;
  float shift = 0.0f;
  if (params.has_dt_bias != 0) shift = M_LOG2E_F * load_one(dt_bias, params.dt_bias_dtype, channel);

  state += batch * params.state.batch;
  ChannelStates states;
  UNROLL for (uint i = 0; i < 2; ++i) {
    const HalfOfChannel of_lane = half_of(place, i, params);
    const ulong log = ulong(of_lane.channel) * params.states + of_lane.first;
    if (of_lane.left >= int(kHalf)) {
      states.load<true>(i, a_log, log, state + of_lane.start, of_lane.left, params);
    } else {
      states.load<false>(i, a_log, log, state + of_lane.start, of_lane.left, params);
    }
  }

  const PendingScan held(pending, batch * groups.x + group.x, params);
  const uint right = count_of(counts, params.pending, batch);
  if (right != 0) {
    held.take_in(states, right, staged, thread_index, params);
    if (params.keep != 0) states.store(place, state, params);
  }
  if (params.keep != 0) {
    threadgroup_barrier(mem_flags::mem_device);  // those that were pending have been read
    held.keep(x + batch * params.x.batch + channel * params.x.head,
              step + batch * params.step.batch + channel * params.step.head, b + batch * params.b.batch,
              shift, is_channel, thread_index, params);
  }

  // Element that a thread stages: a state of B or of C, of tokens kStagedRows apart.
  constexpr uint kStagedRows = kSelectiveThreads / (2 * kSelectiveStates);
  const uint n = thread_index % kSelectiveStates, row = thread_index / kSelectiveStates;
  const bool is_c = row % 2 != 0;
  device const T* source =
      is_c ? c + batch * params.c.batch + n * params.c.head : b + batch * params.b.batch + n * params.b.head;
  const ulong stride = is_c ? params.c.token : params.b.token;
  const float unit = is_c ? 1.0f : M_LN2_F;

  // Each half of 2 * kUnroll tokens is loaded while the states take in the one before it.
  ChannelTokens<T, kUnroll> tokens;
  if (params.tokens >= 2 * kUnroll) tokens = rows.template load<kUnroll>(0, params);
  for (uint first = 0; first < params.tokens; first += kSelectiveTokens) {
    const uint count = min(kSelectiveTokens, params.tokens - first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = row / 2; t < count; t += kStagedRows) {
      threadgroup float* target = reinterpret_cast<threadgroup float*>(&staged[n / kHalf][t]);
      target[(is_c ? kHalf : 0) + n % kHalf] =
          n < params.states ? unit * float(source[(first + t) * stride]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup const StagedToken* token = staged[part];
    uint t = 0;
    for (; t + 2 * kUnroll <= count; t += 2 * kUnroll) {
      const ChannelTokens<T, kUnroll> next = rows.template load<kUnroll>(kUnroll, params);
      scan_tokens(states, tokens, 0, token, shift, factor, results, is_channel, params);
      rows.advance(2 * kUnroll, params);
      if (first + t + 4 * kUnroll <= params.tokens) tokens = rows.template load<kUnroll>(0, params);
      scan_tokens(states, next, kUnroll, token, shift, factor, results, is_channel, params);
      token += 2 * kUnroll;
      results += 2 * kUnroll * params.channels;
    }
    for (; t < count; ++t) {
      const ChannelTokens<T, 1> one = rows.template load<1>(0, params);
      scan_tokens(states, one, 0, token, shift, factor, results, is_channel, params);
      rows.advance(1, params);
      ++token;
      results += params.channels;
    }
  }
  if (params.keep == 0) states.store(place, state, params);
}
