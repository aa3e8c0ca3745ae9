// Low-rank adapters of linear layers and experts: scaling * b_e (a_e x), and gradients. Sums are in float32.
//
// Products with factors take a tile of pairs. Neighbours of one expert share a reading of its factors: where
// pairs are listed by expert most tiles have one. A factor is read where PEFT stores it, in its own dtype.
#pragma once
#include "common/any_stores.h"
#include "common/dtypes.h"
#include "geometry/lora.h"
#include "params/common.h"
#include "params/lora.h"

constant constexpr uint kLoraSimdgroups = kLoraThreads / kSimdWidth;

// A factor of an expert: what inner product `j` has to do with column `c` of the other side.
struct Factor {
  device uchar* data;
  uint dtype;
  ulong start;  // of the expert
  ulong rank_stride, column_stride;

  ulong place(uint j, uint c) const { return start + j * rank_stride + c * column_stride; }
  float at(uint j, uint c) const { return load_one(data, dtype, place(j, c)); }
  void put(uint j, uint c, float value) const { store_any(data, dtype, place(j, c), value); }
};

// Row e r + j of A [r E, inputs].
inline Factor factor_a(device uchar* a, uint expert, constant LoraParams& params) {
  return {a, params.factor_dtype, expert * params.rank * ulong(params.inputs), params.inputs, 1};
}
// Column j E + e of B [outputs, r E], by the strides of B.
inline Factor factor_b(device uchar* b, uint expert, ulong row, ulong column, constant LoraParams& params) {
  return {b, params.factor_dtype, expert * column, params.experts * column, row};
}
inline Factor factor_b(device uchar* b, uint expert, constant LoraParams& params) {
  return factor_b(b, expert, params.b_row, params.b_column, params);
}

// A tile's pairs of one expert.
struct LoraPairs {
  device const int* list;
  uint first, count;
  bool listed;
  uint most;  // the last of all pairs

  // Past the last one, the last. No list leads out of the tensors.
  uint at(uint i) const {
    const uint position = first + min(i, count - 1);
    return listed ? min(uint(list[position]), most) : position;
  }
};

// The expert of a pair; -1 without one.
inline int expert_of(device const uint* ids, uint pair, constant LoraParams& params) {
  if (params.has_ids == 0) return 0;
  const bool is_wide = params.wide_ids != 0;
  const uint low = ids[is_wide ? 2 * ulong(pair) : pair];
  const uint high = is_wide ? ids[2 * ulong(pair) + 1] : 0;
  const uint expert = min(high == 0 ? low : params.experts, params.experts);
  return expert < params.experts ? int(expert) : -1;
}

// The pairs of a tile from `first` to `end` that share the first one's expert.
inline LoraPairs run_of_pairs(device const uint* ids, device const int* list, uint first, uint end,
                              thread int& expert, constant LoraParams& params) {
  LoraPairs pairs = {list, first, 1, params.listed != 0, params.pairs - 1};
  expert = expert_of(ids, pairs.at(0), params);
  while (first + pairs.count < end) {
    const LoraPairs next = {list, first + pairs.count, 1, pairs.listed, pairs.most};
    if (expert_of(ids, next.at(0), params) != expert) break;
    ++pairs.count;
  }
  return pairs;
}

// A thread of the threadgroup, and memory for sums of its simdgroups.
struct LoraThread {
  uint index, lane, simdgroup;
  threadgroup float* partials;  // [kLoraSimdgroups][kLoraPairs][kLoraRanks]
};

// inner[i][j] = scale * sum over columns c of rows[pair i][c] * factor[j][c], for the ranks from `start` on.
template <int kPairs, typename T>
inline void inner_products_of_ranks(Factor factor, device const T* rows, LoraPairs pairs, bool per_pair,
                                    uint width, uint start, float scale, threadgroup float* inner,
                                    LoraThread at, constant LoraParams& params) {
  device const T* sources[kPairs];
  UNROLL for (int i = 0; i < kPairs; ++i) {
    const uint pair = pairs.at(i);
    sources[i] = rows + ulong(per_pair ? pair : pair / params.slots) * width;
  }
  float sums[kPairs][kLoraRanks] = {};
  for (uint c = at.index; c < width; c += kLoraThreads) {
    float own[kLoraRanks];
    UNROLL for (uint j = 0; j < kLoraRanks; ++j) own[j] = factor.at(min(start + j, params.rank - 1), c);
    UNROLL for (int i = 0; i < kPairs; ++i) {
      const float x = float(sources[i][c]);
      UNROLL for (uint j = 0; j < kLoraRanks; ++j) sums[i][j] = fma(x, own[j], sums[i][j]);
    }
  }
  UNROLL for (int i = 0; i < kPairs; ++i) {
    UNROLL for (uint j = 0; j < kLoraRanks; ++j) {
      const float sum = simd_sum(sums[i][j]);
      if (at.lane == 0) at.partials[(at.simdgroup * kLoraPairs + i) * kLoraRanks + j] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint pair = at.index / kLoraRanks, j = at.index % kLoraRanks;
  if (pair < uint(kPairs) && start + j < params.rank) {
    float sum = 0.0f;
    UNROLL for (uint s = 0; s < kLoraSimdgroups; ++s) {
      sum += at.partials[(s * kLoraPairs + pair) * kLoraRanks + j];
    }
    inner[pair * params.rank + start + j] = scale * sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <int kPairs, typename T>
inline void inner_products(Factor factor, device const T* rows, LoraPairs pairs, bool per_pair, uint width,
                           float scale, threadgroup float* inner, LoraThread at,
                           constant LoraParams& params) {
  for (uint start = 0; start < params.rank; start += kLoraRanks) {
    inner_products_of_ranks<kPairs>(factor, rows, pairs, per_pair, width, start, scale, inner, at, params);
  }
}

// sums[i] = sum over ranks of inner[i][j] * factor[j][column]
template <int kPairs>
inline void outer_products(Factor factor, threadgroup const float* inner, uint column,
                           thread float (&sums)[kPairs], constant LoraParams& params) {
  for (uint j = 0; j < params.rank; ++j) {
    const float own = factor.at(j, column);
    UNROLL for (int i = 0; i < kPairs; ++i) sums[i] = fma(inner[i * params.rank + j], own, sums[i]);
  }
}

// Arguments of the kernels below, and the columns [first, last) of the threadgroup.
template <typename T>
struct LoraSide {
  device const T* x;
  device uchar *a, *b;
  uint first, last;
};

// out = added + scaling * b_e (a_e x) for pairs of an expert; without one out = added.
template <typename T>
struct LoraSum {
  LoraSide<T> side;
  device const T* added;
  device T* out;
  threadgroup float* inner;
  LoraThread at;

  template <int kPairs>
  void run(LoraPairs pairs, int expert, constant LoraParams& params) const {
    const uint own = uint(max(expert, 0));
    if (expert >= 0) {
      inner_products<kPairs>(factor_a(side.a, own, params), side.x, pairs, params.x_per_pair != 0,
                             params.inputs, 1.0f, inner, at, params);
    }
    for (uint c = side.first + at.index; c < side.last; c += kLoraThreads) {
      float sums[kPairs] = {};
      if (expert >= 0) outer_products<kPairs>(factor_b(side.b, own, params), inner, c, sums, params);
      UNROLL for (int i = 0; i < kPairs; ++i) {
        const ulong place = ulong(pairs.at(i)) * params.outputs + c;
        if (uint(i) < pairs.count) out[place] = T(float(added[place]) + params.scaling * sums[i]);
      }
    }
  }
};

// dx = a_e^T g, with g = scaling * b_e^T dy, which is kept with i = a_e x; without an expert dx = 0.
template <typename T>
struct LoraGradients {
  LoraSide<T> side;
  device const T* dy;
  device T* dx;
  device float* gradients;
  device float* products;
  threadgroup float* memory;
  LoraThread at;

  template <int kPairs>
  void run(LoraPairs pairs, int expert, constant LoraParams& params) const {
    threadgroup float *own = memory, *inner = memory + kLoraPairs * params.rank;
    const uint number = uint(max(expert, 0));
    if (expert >= 0) {
      inner_products<kPairs>(factor_b(side.b, number, params), dy, pairs, true, params.outputs,
                             params.scaling, own, at, params);
      inner_products<kPairs>(factor_a(side.a, number, params), side.x, pairs, params.x_per_pair != 0,
                             params.inputs, 1.0f, inner, at, params);
      for (uint i = at.index; side.first == 0 && i < pairs.count * params.rank; i += kLoraThreads) {
        const ulong place = ulong(pairs.at(i / params.rank)) * params.rank + i % params.rank;
        gradients[place] = own[i];
        products[place] = inner[i];
      }
    }
    for (uint c = side.first + at.index; c < side.last; c += kLoraThreads) {
      float sums[kPairs] = {};
      if (expert >= 0) outer_products<kPairs>(factor_a(side.a, number, params), own, c, sums, params);
      UNROLL for (int i = 0; i < kPairs; ++i) {
        if (uint(i) < pairs.count) dx[ulong(pairs.at(i)) * params.inputs + c] = T(sums[i]);
      }
    }
  }
};

// Runs `work` for each run of a tile's pairs that share an expert.
template <typename Work>
inline void run_tile(Work work, uint tile, device const uint* ids, device const int* list,
                     constant LoraParams& params) {
  const uint begin = tile * params.tile_pairs, end = min(begin + params.tile_pairs, params.pairs);
  for (uint position = begin; position < end;) {
    int expert;
    const LoraPairs pairs = run_of_pairs(ids, list, position, end, expert, params);
    position += pairs.count;
    if (pairs.count == 1) {
      work.template run<1>(pairs, expert, params);
    } else {
      work.template run<kLoraPairs>(pairs, expert, params);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the inner products have been read
  }
}

// Grid: (blocks of `columns` outputs, tiles).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kLoraThreads)]] void lora(
    device const T* added [[buffer(0)]], device const T* x [[buffer(1)]], device uchar* a [[buffer(2)]],
    device uchar* b [[buffer(3)]], device const uint* ids [[buffer(4)]],
    device const int* pair_order [[buffer(5)]], device T* out [[buffer(6)]],
    constant LoraParams& params [[buffer(7)]], threadgroup float* inner [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float partials[kLoraSimdgroups * kLoraPairs * kLoraRanks];
  const uint first = group.x * params.columns, last = min(first + params.columns, params.outputs);
  const LoraSum<T> work = {
      {x, a, b, first, last}, added, out, inner, {thread_index, lane, simdgroup, partials}};
  run_tile(work, group.y, ids, pair_order, params);
}

// Grid: (blocks of `columns` inputs, tiles). Gradients and products of inner dimensions: [pairs, rank].
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kLoraThreads)]] void lora_backward(
    device const T* dy [[buffer(0)]], device const T* x [[buffer(1)]], device uchar* a [[buffer(2)]],
    device uchar* b [[buffer(3)]], device const uint* ids [[buffer(4)]],
    device const int* pair_order [[buffer(5)]], device T* dx [[buffer(6)]],
    device float* gradients [[buffer(7)]], device float* products [[buffer(8)]],
    constant LoraParams& params [[buffer(9)]], threadgroup float* memory [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES) {
  threadgroup float partials[kLoraSimdgroups * kLoraPairs * kLoraRanks];
  const uint first = group.x * params.columns, last = min(first + params.columns, params.inputs);
  const LoraGradients<T> work = {
      {x, a, b, first, last}, dy, dx, gradients, products, memory, {thread_index, lane, simdgroup, partials}};
  run_tile(work, group.y, ids, pair_order, params);
}

inline uint listed_pair(device const int* list, uint position, constant LoraParams& params) {
  return min(uint(list[position]), params.pairs - 1);
}

// The gradient of a factor: for each of its columns and ranks the sum over an expert's pairs, in ascending
// order, of scale * rows[pair][column] * inner[pair][j].
template <typename T>
inline void outer_sums(Factor factor, device const T* rows, device const float* inner, bool per_pair,
                       uint width, uint column, float scale, uint first, uint end, device const int* list,
                       threadgroup float* staged, uint thread_index, constant LoraParams& params) {
  const bool exists = column < width;
  for (uint start = 0; start < params.rank; start += kOuterRanks) {
    float sums[kOuterRanks] = {};
    for (uint position = first; position < end; position += kOuterPairs) {
      const uint count = min(uint(kOuterPairs), end - position);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // what was staged before has been read
      for (uint i = thread_index; i < count * kOuterRanks; i += kLoraThreads) {
        const uint j = min(start + i % kOuterRanks, params.rank - 1);
        staged[i] = inner[ulong(listed_pair(list, position + i / kOuterRanks, params)) * params.rank + j];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = 0; exists && i < count; ++i) {
        const uint pair = listed_pair(list, position + i, params);
        const float x = float(rows[ulong(per_pair ? pair : pair / params.slots) * width + column]);
        UNROLL for (uint j = 0; j < kOuterRanks; ++j) {
          sums[j] = fma(x, staged[i * kOuterRanks + j], sums[j]);
        }
      }
    }
    UNROLL for (uint j = 0; j < kOuterRanks; ++j) {
      if (exists && start + j < params.rank) factor.put(start + j, column, scale * sums[j]);
    }
  }
}

// Grid: (blocks of kLoraThreads columns of A, then those of B's rows; experts).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kLoraThreads)]] void lora_outer(
    device const T* dy [[buffer(0)]], device const T* x [[buffer(1)]],
    device const float* gradients [[buffer(2)]], device const float* products [[buffer(3)]],
    device const int* pair_order [[buffer(4)]], device const int* offsets [[buffer(5)]],
    device uchar* da [[buffer(6)]], device uchar* db [[buffer(7)]], constant LoraParams& params [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float staged[kOuterPairs * kOuterRanks];
  const uint blocks = (params.inputs + kLoraThreads - 1) / kLoraThreads;
  const uint first = uint(offsets[group.y]), end = min(uint(offsets[group.y + 1]), params.pairs);
  if (group.x < blocks) {
    outer_sums(factor_a(da, group.y, params), x, gradients, params.x_per_pair != 0, params.inputs,
               group.x * kLoraThreads + thread_index, 1.0f, first, end, pair_order, staged, thread_index,
               params);
  } else {
    outer_sums(factor_b(db, group.y, 1, params.outputs, params), dy, products, true, params.outputs,
               (group.x - blocks) * kLoraThreads + thread_index, params.scaling, first, end, pair_order,
               staged, thread_index, params);
  }
}
