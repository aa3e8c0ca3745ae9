// Expert matmuls for many pairs: tiles of kTileRows pairs of one expert times kTileColumns rows of its
// matrix.
#pragma once
#include <metal_simdgroup_matrix>

#include "expert_common.h"
#include "expert_formats.h"

constant constexpr int kTileDepth = 32;
constant constexpr int kSimdgroupColumns = 16;  // and all rows of the tile: four simdgroups side by side
constant constexpr int kRowFragments = kTileRows / 8;
constant constexpr int kColumnFragments = kSimdgroupColumns / 8;

template <typename T>
inline void store_octet(threadgroup T* target, Pack<8> values) {
  UNROLL for (int half_octet = 0; half_octet < 2; ++half_octet) {
    vec<T, 4> four;
    UNROLL for (int i = 0; i < 4; ++i) four[i] = T(values.v[4 * half_octet + i]);
    reinterpret_cast<threadgroup vec<T, 4>*>(target)[half_octet] = four;
  }
}

// The weight row in column `local` of the tile whose first output is `first`: the tile holds the gate and the
// up row of an output.
inline uint tile_weight_row(uint first, uint local, constant ExpertParams& params) {
  if (params.row_layout == ROWS_INTERLEAVED) return 2 * first + local;
  if (params.row_layout == ROWS_HALVES) {
    constexpr uint kHalf = kTileColumns / 2;
    return first + local % kHalf + (local < kHalf ? 0 : params.outputs);
  }
  return first + local;
}

inline bool tile_column_used(uint first, uint local, constant ExpertParams& params) {
  if (params.row_layout == ROWS_INTERLEAVED) return first + local / 2 < params.outputs;
  if (params.row_layout == ROWS_HALVES) return first + local % (kTileColumns / 2) < params.outputs;
  return first + local < params.outputs;
}

// A thread's share of the weight tile between its loads and its stores to threadgroup memory: kShare values
// of one row. Loads of the next tile are in flight while the matrix units work on this one.
template <typename W>
struct WeightShare {
  typedef typename W::Element T;
  static constant constexpr int kShare = kTileColumns * kTileDepth / kGemmThreads;
  static constant constexpr int kChunks = kShare / (8 * W::kOctets);
  static constant constexpr int kStride =
      kTileDepth + 16 / sizeof(T);  // of the tile in threadgroup memory, [columns][depth]
  static constant constexpr int kTileSize = kTileColumns * kStride;

  typename W::Chunk chunks[kChunks];
  uint local;
  uint column;
  uint row;
  bool used;

  WeightShare(uint thread_index, uint first, constant ExpertParams& params)
      : local(thread_index / (kTileDepth / kShare)), column(thread_index % (kTileDepth / kShare) * kShare) {
    row = tile_weight_row(first, local, params);
    used = tile_column_used(first, local, params);
  }

  void load(W weights, uint depth, constant ExpertParams& params) {
    UNROLL for (int i = 0; i < kChunks; ++i) {
      const uint at = depth + column + i * 8 * W::kOctets;
      if (used && at < params.inputs) chunks[i] = weights.load(weights.at(row), at);
    }
  }

  void store(W weights, uint depth, threadgroup T* tile, constant ExpertParams& params) const {
    UNROLL for (int i = 0; i < kChunks; ++i) {
      const uint offset = column + i * 8 * W::kOctets;
      const bool loaded = used && depth + offset < params.inputs;
      UNROLL for (int o = 0; o < W::kOctets; ++o) {
        Pack<8> values;
        if (loaded) {
          values = weights.octet(chunks[i], o);
        } else {
          UNROLL for (int j = 0; j < 8; ++j) values.v[j] = 0.0f;
        }
        store_octet(tile + local * kStride + offset + 8 * o, values);
      }
    }
  }

  // B[k][n] is the tile's row n, column k.
  static void load_fragment(thread simdgroup_matrix<T, 8, 8>& b, threadgroup const T* tile, uint n, uint k) {
    simdgroup_load(b, tile + n * kStride + k, kStride, ulong2(0), true);
  }
};

// The same where the input dimension of the weights comes first: the tile is [depth][columns].
template <typename T>
struct WeightShare<DenseColumns<T>> {
  static constant constexpr int kShare = kTileColumns * kTileDepth / kGemmThreads;
  static constant constexpr int kStride = kTileColumns + 16 / sizeof(T);
  static constant constexpr int kTileSize = kTileDepth * kStride;

  T values[kShare];
  uint depth_row;
  uint local;
  uint first;

  WeightShare(uint thread_index, uint first_, constant ExpertParams&)
      : depth_row(thread_index / kTileColumns), local(thread_index % kTileColumns), first(first_) {}

  void load(DenseColumns<T> weights, uint depth, constant ExpertParams& params) {
    const uint row = tile_weight_row(first, local, params);
    const bool used = tile_column_used(first, local, params);
    UNROLL for (int i = 0; i < kShare; ++i) {
      const uint column = depth + depth_row + i * (kGemmThreads / kTileColumns);
      values[i] = used && column < params.inputs ? weights.at(row, column) : T(0.0f);
    }
  }

  void store(DenseColumns<T>, uint, threadgroup T* tile, constant ExpertParams&) const {
    UNROLL for (int i = 0; i < kShare; ++i) {
      tile[(depth_row + i * (kGemmThreads / kTileColumns)) * kStride + local] = values[i];
    }
  }

  static void load_fragment(thread simdgroup_matrix<T, 8, 8>& b, threadgroup const T* tile, uint n, uint k) {
    simdgroup_load(b, tile + k * kStride + n, kStride);
  }
};

// A thread's share of the tile of inputs: eight columns of one pair's row.
template <typename T>
struct InputShare {
  static constant constexpr int kStride = kTileDepth + 16 / sizeof(T);
  static constant constexpr int kTileSize = kTileRows * kStride;

  device const T* source;
  Octet<T> octet;
  uint local;
  uint column;
  bool used;

  InputShare(uint thread_index, device const T* x, device const int* order, uint count,
             constant ExpertParams& params)
      : source(x), local(thread_index / (kTileDepth / 8)), column(thread_index % (kTileDepth / 8) * 8) {
    used = local < count;
    if (used) {
      const uint pair = order[local];
      source = x + ulong(input_row(pair, params)) * params.inputs;
    }
  }

  void load(uint depth, constant ExpertParams& params) {
    const uint at = depth + column;
    if (used && at < params.inputs)
      octet = load_octet(source + at, params.inputs - at, params.vectorised != 0);
  }

  void store(uint depth, threadgroup T* tile, constant ExpertParams& params) const {
    Pack<8> values;
    if (used && depth + column < params.inputs) {
      values = octet.values();
    } else {
      UNROLL for (int i = 0; i < 8; ++i) values.v[i] = 0.0f;
    }
    store_octet(tile + local * kStride + column, values);
  }
};

// Four simdgroups times kTileRows x kSimdgroupColumns sums in float. Fragments of rows past the last pair are
// left out.
struct TileSums {
  simdgroup_matrix<float, 8, 8> sums[kRowFragments][kColumnFragments];

  TileSums() {
    UNROLL for (int i = 0; i < kRowFragments; ++i) {
      UNROLL for (int j = 0; j < kColumnFragments; ++j) sums[i][j] =
          make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  template <typename Share, typename T>
  void add(threadgroup const T* inputs, threadgroup const T* weights, uint simdgroup, uint count) {
    constexpr int kStride = InputShare<T>::kStride;
    UNROLL for (int k = 0; k < kTileDepth; k += 8) {
      simdgroup_matrix<T, 8, 8> b[kColumnFragments];
      UNROLL for (int j = 0; j < kColumnFragments; ++j) {
        Share::load_fragment(b[j], weights, simdgroup * kSimdgroupColumns + 8 * j, k);
      }
      UNROLL for (int i = 0; i < kRowFragments; ++i) {
        if (uint(8 * i) < count) {
          simdgroup_matrix<T, 8, 8> a;
          simdgroup_load(a, inputs + 8 * i * kStride + k, kStride);
          UNROLL for (int j = 0; j < kColumnFragments; ++j) {
            simdgroup_multiply_accumulate(sums[i][j], a, b[j], sums[i][j]);
          }
        }
      }
    }
  }

  void store(threadgroup float* target, int stride, uint simdgroup, uint count) const {
    UNROLL for (int i = 0; i < kRowFragments; ++i) {
      if (uint(8 * i) < count) {
        UNROLL for (int j = 0; j < kColumnFragments; ++j) {
          simdgroup_store(sums[i][j], target + 8 * i * stride + simdgroup * kSimdgroupColumns + 8 * j,
                          stride);
        }
      }
    }
  }
};

// Bias, activation and the store to the pairs' rows of `out`. Rows and columns outside the tile are not
// written.
template <typename T>
inline void store_tile(threadgroup const float* sums, int stride, uint expert, uint first, uint count,
                       device const int* order, device const uchar* bias, device T* out, uint thread_index,
                       constant ExpertParams& params) {
  const uint width = params.row_layout == ROWS_PLAIN ? kTileColumns : kTileColumns / 2;
  const uint columns = min(width, params.outputs - first);
  for (uint i = thread_index; i < count * width; i += kGemmThreads) {
    const uint column = i % width;
    if (column >= columns) continue;
    threadgroup const float* row = sums + i / width * stride;
    device T* target = out + ulong(order[i / width]) * params.outputs + first + column;
    const bool plain = params.row_layout == ROWS_PLAIN, interleaved = params.row_layout == ROWS_INTERLEAVED;
    const uint own = interleaved ? 2 * column : column;
    const float up = plain ? 0.0f : row[interleaved ? own + 1 : own + kTileColumns / 2];
    *target = T(finished_output(row[own], up, bias, expert, first + column, params));
  }
}

// Grid: (blocks of columns, tiles), from moe_bucket: a tile is (expert, first position in pair_order, pairs),
// with expert -1 for pairs without an expert, whose rows become zero.
template <typename W>
[[kernel, max_total_threads_per_threadgroup(kGemmThreads)]] void expert_gemm(
    device const typename W::Element* x [[buffer(0)]], device const uchar* packed [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device const uchar* bias [[buffer(4)]], device typename W::Element* out [[buffer(5)]],
    device const int* pair_order [[buffer(6)]], device const int4* tiles [[buffer(7)]],
    constant ExpertParams& params [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  typedef WeightShare<W> Weights;
  typedef InputShare<T> Inputs;
  constexpr int kSumStride = kTileColumns + 4;
  constexpr int kTileBytes = (Inputs::kTileSize + Weights::kTileSize) * sizeof(T);
  constexpr int kSumBytes = kTileRows * kSumStride * sizeof(float);
  // Of vectors, for their alignment: the tiles are stored by vectors.
  threadgroup float4 memory[(kTileBytes > kSumBytes ? kTileBytes : kSumBytes) / sizeof(float4)];
  threadgroup T* input_tile = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* weight_tile = input_tile + Inputs::kTileSize;

  const uint first = group.x * (params.row_layout == ROWS_PLAIN ? kTileColumns : kTileColumns / 2);
  const int4 tile = tiles[group.y];
  const uint count = tile.z;
  device const int* order = pair_order + tile.y;
  if (count == 0) return;
  if (tile.x < 0) {
    const uint columns = min(kTileColumns, params.outputs - first);
    for (uint i = thread_index; i < count * columns; i += kGemmThreads) {
      out[ulong(order[i / columns]) * params.outputs + first + i % columns] = T(0.0f);
    }
    return;
  }
  const uint expert = tile.x;

  const W weights(packed, scales, biases, expert, params);
  Weights weight_share(thread_index, first, params);
  Inputs input_share(thread_index, x, order, count, params);
  TileSums sums;
  weight_share.load(weights, 0, params);
  input_share.load(0, params);
  for (uint depth = 0; depth < params.inputs; depth += kTileDepth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weight_share.store(weights, depth, weight_tile, params);
    input_share.store(depth, input_tile, params);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weight_share.load(weights, depth + kTileDepth, params);
    input_share.load(depth + kTileDepth, params);
    sums.template add<Weights, T>(input_tile, weight_tile, simdgroup, count);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* sum_tile = reinterpret_cast<threadgroup float*>(memory);
  sums.store(sum_tile, kSumStride, simdgroup, count);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_tile(sum_tile, kSumStride, expert, first, count, order, bias, out, thread_index, params);
}
