// Expert matmuls for many pairs: tiles of up to 8 * kPairTiles pairs of one expert times rows of its matrix.
//
// A simdgroup dequantises its own rows straight into matrix fragments, so that each weight is dequantised
// once a tile and touches no threadgroup memory; the inputs, which all simdgroups need, go through it. That
// relies on the layout of an 8x8 matrix over the lanes, the same on every Apple GPU: a lane holds two
// neighbouring elements of a row, four lanes a row. The product is rows x pairs, so that those two are two
// inputs of a weight row. Which two, the format decides; the inputs are staged in its order.
#pragma once
#include <metal_simdgroup_matrix>

#include "experts/epilogue.h"
#include "experts/formats.h"

// Fragments are halves for half activations, else floats, whose products run at the same rate: before the M3,
// rounding to bfloat takes five instructions.
template <typename T>
struct FragmentOf {
  typedef float type;
};
template <>
struct FragmentOf<half> {
  typedef half type;
};

// A lane's place in a matrix of 8x8.
struct MatrixPlace {
  uint row;
  uint quarter;  // its elements are in columns 2 * quarter and 2 * quarter + 1

  MatrixPlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};

template <typename W, int kPairTiles>
struct Tile {
  typedef typename W::Element T;
  typedef typename FragmentOf<T>::type F;
  typedef typename W::template Chunk<W::kTileValues> Chunk;
  static constant constexpr int kRowTiles = kGemmRows / (8 * kGemmSimdgroups);
  static constant constexpr int kPairs = 8 * kPairTiles;
  static constant constexpr int kDepth = 4 * W::kTileValues;  // inputs of a step
  static constant constexpr int kStride = kPairs + 4;         // of an input in threadgroup memory; not tuned
  static constant constexpr int kThreads = kGemmSimdgroups * kSimdWidth;

  // The rows of a lane, one of each of the simdgroup's row tiles: gates and ups alternate.
  struct Rows {
    typename W::Row starts[kRowTiles];
    Chunk chunks[kRowTiles];

    Rows(W weights, uint first, MatrixPlace place, constant ExpertParams& params) {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        const bool plain = params.row_layout == ROWS_PLAIN;
        const uint output = min(first + 8 * (plain ? r : r / 2) + place.row, params.outputs - 1);
        starts[r] = weights.row(weight_row(output, r % 2, params));
      }
    }

    // Zeros past the last input.
    void load(W weights, uint column, uint inputs) {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        chunks[r] = {};
        if (column < inputs) {
          chunks[r] = weights.template load<W::kTileValues>(starts[r], column, inputs - column);
        }
      }
    }
  };

  // A thread's share of the inputs: octets of pairs' rows.
  struct Inputs {
    static constant constexpr int kOctets = kDepth / 8;  // of a pair
    static constant constexpr int kShares = (kPairs * kOctets + kThreads - 1) / kThreads;
    Elements<T, 8> octets[kShares];

    static uint octet(uint thread_index, int share) { return (thread_index + share * kThreads) % kOctets; }
    static uint pair(uint thread_index, int share) { return (thread_index + share * kThreads) / kOctets; }

    void load(device const T* x, threadgroup const uint* sources, uint count, uint depth, uint thread_index,
              constant ExpertParams& params) {
      UNROLL for (int share = 0; share < kShares; ++share) {
        const uint column = depth + 8 * octet(thread_index, share), local = pair(thread_index, share);
        if (local < count && column < params.inputs) {
          octets[share] = load_elements<8>(x + ulong(sources[local]) * params.inputs + column,
                                           params.inputs - column, params.vectorised != 0);
        }
      }
    }

    // [kDepth][kStride]: the row of an input is its fragment and its place there.
    void store(threadgroup F* tile, uint count, uint depth, uint thread_index,
               constant ExpertParams& params) const {
      UNROLL for (int share = 0; share < kShares; ++share) {
        const uint first = 8 * octet(thread_index, share), local = pair(thread_index, share);
        if (local >= kPairs) continue;
        const bool exists = local < count && depth + first < params.inputs;
        const uint quarter = first / W::kTileValues, before = first % W::kTileValues;
        UNROLL for (int i = 0; i < 8; ++i) {
          const PairPlace place = W::pair_place(before + i);
          tile[(8 * place.pair + 2 * quarter + place.element) * kStride + local] =
              exists ? F(octets[share].at(i)) : F(0.0f);
        }
      }
    }
  };

  // Sums of kRowTiles x kPairTiles matrices of rows x pairs. Fragments past the last pair are left out.
  struct Sums {
    simdgroup_matrix<float, 8, 8> sums[kRowTiles][kPairTiles];

    Sums() {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        UNROLL for (int p = 0; p < kPairTiles; ++p) sums[r][p] =
            make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }

    void add(thread Rows& rows, threadgroup const F* tile, uint count) {
      UNROLL for (int k = 0; k < kDepth / 8; ++k) {
        simdgroup_matrix<F, 8, 8> weights[kRowTiles];
        UNROLL for (int r = 0; r < kRowTiles; ++r) {
          const float2 two = W::values(rows.chunks[r], k);
          weights[r].thread_elements()[0] = F(two.x);
          weights[r].thread_elements()[1] = F(two.y);
        }
        UNROLL for (int p = 0; p < kPairTiles; ++p) {
          if (p == 0 || uint(8 * p) < count) {
            simdgroup_matrix<F, 8, 8> inputs;
            simdgroup_load(inputs, tile + 8 * k * kStride + 8 * p, kStride);
            UNROLL for (int r = 0; r < kRowTiles; ++r) {
              simdgroup_multiply_accumulate(sums[r][p], weights[r], inputs, sums[r][p]);
            }
          }
        }
      }
    }

    // Bias, activation and the store to the pairs' rows of `out`.
    void store(device const int* order, uint count, device const uchar* bias, uint expert, uint first,
               MatrixPlace place, device T* out, constant ExpertParams& params) {
      const bool plain = params.row_layout == ROWS_PLAIN;
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        UNROLL for (int j = 0; j < 2; ++j) {
          const uint local = 8 * p + 2 * place.quarter + j;
          if (local >= count) continue;
          device T* target = out + ulong(order[local]) * params.outputs;
          UNROLL for (int r = 0; r < kRowTiles; ++r) {
            const uint output = first + 8 * (plain ? r : r / 2) + place.row;
            if ((!plain && r % 2 != 0) || output >= params.outputs) continue;
            const float own = sums[r][p].thread_elements()[j];
            const float up = plain ? 0.0f : sums[r + 1 < kRowTiles ? r + 1 : r][p].thread_elements()[j];
            target[output] = T(finished_output(own, up, bias, expert, output, params));
          }
        }
      }
    }
  };
};

// Grid: (blocks of rows, tiles). A tile, from moe_bucket, is (expert, first position in pair_order, pairs),
// with expert -1 for pairs without an expert, whose outputs become zero.
template <typename W, int kPairTiles>
[[kernel, max_total_threads_per_threadgroup(kGemmBound)]] void expert_gemm(
    EXPERT_ROWS_BUFFERS(typename W::Element), device const int* pair_order [[buffer(8)]],
    device const int4* tiles [[buffer(9)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Tile<W, kPairTiles> Tile;
  typedef typename Tile::T T;
  typedef typename Tile::F F;
  threadgroup F input_tile[Tile::kDepth * Tile::kStride];
  threadgroup uint sources[Tile::kPairs];
  const uint block = outputs_of_rows(kGemmRows, params);
  const uint first_of_group = group.x * block, first = first_of_group + simdgroup * block / kGemmSimdgroups;
  const int4 tile = tiles[group.y];
  const uint count = tile.z;
  device const int* order = pair_order + tile.y;
  if (count == 0) return;
  if (tile.x < 0) {
    const uint columns = min(block, params.outputs - first_of_group);
    for (uint i = thread_index; i < count * columns; i += Tile::kThreads) {
      out[ulong(order[i / columns]) * params.outputs + first_of_group + i % columns] = T(0.0f);
    }
    return;
  }
  const uint expert = tile.x;
  if (thread_index < count) sources[thread_index] = input_row(order[thread_index], params);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const MatrixPlace place(lane);
  const W weights(packed, scales, biases, expert, params);
  typename Tile::Rows rows(weights, first, place, params);
  typename Tile::Inputs inputs;
  typename Tile::Sums sums;
  inputs.load(x, sources, count, 0, thread_index, params);
  for (uint depth = 0; depth < params.inputs; depth += Tile::kDepth) {
    rows.load(weights, depth + place.quarter * W::kTileValues, params.inputs);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile before this one has been read
    inputs.store(input_tile, count, depth, thread_index, params);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    inputs.load(x, sources, count, depth + Tile::kDepth, thread_index, params);
    sums.add(rows, input_tile, count);
  }
  sums.store(order, count, bias, expert, first, place, out, params);
}
