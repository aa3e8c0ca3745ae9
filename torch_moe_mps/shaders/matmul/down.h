// The second matmul of the experts for a few tokens, together with the weighted sum over a token's slots, the
// shared expert and the residual. The products of the pairs stay in threadgroup memory.
#pragma once
#include "common/simdgroups.h"
#include "expert_sum.h"
#include "geometry/variants.h"
#include "matmul/dots.h"
#include "matmul/epilogue.h"
#include "matmul/pairs.h"

// The terms of a token's sum: for kRows rows and each pair of the threadgroup, routing weight * (product +
// bias).
template <int kRows>
struct PairTerms {
  threadgroup float* values;

  threadgroup float& at(uint pair, uint row) const { return values[pair * kRows + row]; }

  void clear(uint pair) const { UNROLL for (int r = 0; r < kRows; ++r) at(pair, r) = 0.0f; }

  // The sum over the slots of a token, ascending; `first` is the token's first pair.
  float sum(uint first, uint slots, uint row) const {
    float sum = 0.0f;
    for (uint slot = 0; slot < slots; ++slot) sum += at(first + slot, row);
    return sum;
  }
};

// The outputs of `tokens` tokens from the terms of their pairs.
template <typename T, int kRows>
inline void store_combined(PairTerms<kRows> terms, device const int* ids, device const uchar* routing,
                           uint first_token, uint tokens, uint first_row, Addends<T> addends, device T* out,
                           uint thread_index, uint threads, constant ExpertDownParams& params) {
  const uint slots = params.matmul.slots, columns = params.matmul.outputs;
  for (uint i = thread_index; i < tokens * kRows; i += threads) {
    const uint token = first_token + i / kRows, row = first_row + i % kRows;
    if (row >= columns) continue;
    float sum = terms.sum(i / kRows * slots, slots, i % kRows);
    if (params.has_shared_expert != 0) {
      sum += factor_of_shared(addends.shared_gate, token, params.sum) * terms.at(slots, i % kRows);
    }
    if (params.has_identity != 0) {
      const float input = float(addends.shared_out[ulong(token) * columns + row]);
      sum += weight_beyond(ids, routing, token, params) * input;
    }
    out[ulong(token) * columns + row] = T(addends.add_to(sum, token, row, columns, params.sum));
  }
}

// Parts of the terms of a block of rows.
template <typename W, int R>
struct TermsBlock {
  RowBlock<W, R> rows;
  device const uchar* routing;
  device const uchar* bias;
  PairTerms<kRowGroups * R> terms;

  // Computes the terms of M pairs, of which `count` exist; `places` says where in `terms` they go.
  template <int M>
  void add(PairSet<M> pairs, PairSet<M> places, uint count, constant ExpertDownParams& params) const {
    constant MatmulParams& matmul = params.matmul;
    Sources<M> sources;
    UNROLL for (int m = 0; m < M; ++m) sources.v[m] = pairs.v[m] * matmul.inputs;
    const Dots<R, M> dots = rows.dots(sources, {0, 1}, matmul);
    const uint lane = anew(rows.lane, rows.lane);
    for (uint item = lane % kRowLanes; item < R * M; item += kRowLanes) {
      const uint m = item / R, local = lane / kRowLanes * R + item % R;
      if (m >= count) continue;
      const uint row = min(rows.first + local, matmul.outputs - 1), pair = pairs.at(m);
      const float weight = pair < matmul.pairs ? load_one(routing, params.sum.weights_dtype, pair) : 1.0f;
      terms.at(places.at(m), local) =
          weight * with_bias(dots.at(item % R, m), bias, rows.expert, row, matmul);
    }
  }
};

// For one token; the simdgroups take turns at its slots. A pair behind those of the only token is of the
// shared expert. Grid: (blocks of rows, tokens).
//
// With kInTurn each simdgroup has rows of its own and takes all slots, so that a threadgroup reads
// neighbouring rows of one expert at a time.
template <typename W, int R, bool kInTurn = false>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void expert_down(
    DOWN_BUFFERS(typename W::Element), device const uchar* shared_packed [[buffer(12)]],
    device const uchar* shared_scales [[buffer(13)]], device const uchar* shared_biases [[buffer(14)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  constexpr int kRows = kRowGroups * R;
  constexpr int kTerms = (kMaxSlots + 1) * kRows;
  threadgroup float memory[(kInTurn ? kVariantSimdgroups : 1) * kTerms];
  constant MatmulParams& matmul = params.matmul;
  const PairTerms<kRows> terms = {memory + (kInTurn ? simdgroup * kTerms : 0)};
  const uint token = group.y, block = kInTurn ? group.x * simdgroups + simdgroup : group.x;
  const uint first = block * kRows;
  if (kInTurn && first >= matmul.outputs) return;
  const uint turn = kInTurn ? 0 : simdgroup, turns = kInTurn ? 1 : simdgroups;
  for (uint slot = turn; slot < matmul.slots + params.has_shared_expert; slot += turns) {
    const PairSet<1> pairs = {{token * matmul.slots + slot}}, places = {{slot}};
    const bool is_shared = slot == matmul.slots;
    const uint expert = is_shared ? 0 : expert_of(ids, pairs.v[0], matmul);
    if (expert < matmul.experts) {
      const W weights(is_shared ? shared_packed : packed, is_shared ? shared_scales : scales,
                      is_shared ? shared_biases : biases, expert, matmul);
      const TermsBlock<W, R> rows = {row_block<R>(weights, x, expert, first, lane, matmul), routing, bias,
                                     terms};
      rows.add(pairs, places, 1, params);
    } else if (lane == 0) {
      terms.clear(slot);
    }
  }
  const Addends<T> addends = {shared_gate, shared_out, residual};
  if constexpr (kInTurn) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    store_combined<T>(terms, ids, routing, token, 1, first, addends, out, lane, kSimdWidth, params);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_combined<T>(terms, ids, routing, token, 1, first, addends, out, thread_index,
                      simdgroups * kSimdWidth, params);
  }
}
