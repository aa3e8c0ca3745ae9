// Expert matmuls for many pairs: tiles of up to 8 * kPairTiles pairs of one expert times rows of its matrix.
//
// A simdgroup dequantises its own rows straight into matrix fragments, so that each weight is dequantised
// once a tile and touches no threadgroup memory; the inputs, which all simdgroups need, go through it. That
// relies on the layout of an 8x8 matrix over the lanes, the same on every Apple GPU: a lane holds two
// neighbouring elements of a row, four lanes a row. The product is rows x pairs, so that those two are two
// inputs of a weight row. Which two, the format decides; the inputs are staged in its order.
#pragma once
#include <metal_simdgroup_matrix>

#include "matmul/epilogue.h"
#include "matmul/formats.h"

// Fragments are halves for half activations and floats for all others. Products of both run at the same rate,
// and before the M3 rounding to bfloat takes five instructions.
template <typename T>
struct FragmentOf {
  typedef float type;
};
template <>
struct FragmentOf<half> {
  typedef half type;
};

// A lane's place in a matrix of 8x8. Metal leaves it open; it is the same on all Apple GPUs up to now.
struct MatrixPlace {
  uint row;
  uint quarter;  // the lane's elements are in columns 2 * quarter and 2 * quarter + 1

  MatrixPlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};

// The pairs of a tile: consecutive entries of a list, or without a list consecutive pairs, from `first` on.
struct TilePairs {
  device const int* list;
  uint first;
  uint count;
  bool listed;

  uint at(uint index) const { return listed ? uint(list[first + index]) : first + index; }
};

// The work of a threadgroup: kGemmRows rows times the inputs of up to 8 * kPairTiles pairs. The loop over the
// inputs has no branches: fragments past the last pair are left out by choosing a smaller kPairTiles.
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

  // The rows of a lane: one in each row tile of the simdgroup. Gate and up rows alternate.
  struct Rows {
    typename W::Row starts[kRowTiles];
    Chunk chunks[kRowTiles];

    Rows(W weights, uint first, MatrixPlace place, constant MatmulParams& params) {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        const bool plain = params.row_layout == ROWS_PLAIN;
        const uint output = min(first + 8 * (plain ? r : r / 2) + place.row, params.outputs - 1);
        starts[r] = weights.row(weight_row(output, r % 2, params));
      }
    }

    // Zeros past the last input.
    void load(W weights, uint column, uint inputs) {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        Chunk chunk = {};
        if (column < inputs) {
          chunk = weights.template load<W::kTileValues>(starts[r], column, inputs - column);
        }
        chunks[r] = chunk;
      }
    }
  };

  // The part of the inputs that a thread copies: eight columns of some pairs.
  struct Inputs {
    static constant constexpr int kOctets = kDepth / 8;              // of a pair
    static constant constexpr int kPairsApart = kThreads / kOctets;  // of a thread's pairs
    static constant constexpr int kShares = (kPairs + kPairsApart - 1) / kPairsApart;

    device const T* sources[kShares];
    uint first;   // column of a step
    uint pair;    // the first of the thread's pairs
    uint target;  // its place in the tile

    Inputs(device const T* x, TilePairs pairs, uint thread_index, constant MatmulParams& params)
        : first(8 * (thread_index % kOctets)), pair(thread_index / kOctets) {
      target = (tile_row(first % W::kTileValues) + 2 * (first / W::kTileValues)) * kStride + pair;
      UNROLL for (int share = 0; share < kShares; ++share) {
        const uint row = input_row(pairs.at(min(pair + share * kPairsApart, pairs.count - 1)), params);
        sources[share] = x + ulong(row) * params.inputs;
      }
    }

    // Where a value of a chunk lies: by its fragment and its place there. Additive for multiples of 8.
    static uint tile_row(int value) {
      const PairPlace place = W::pair_place(value);
      return 8 * place.pair + place.element;
    }

    // Copies the inputs to [kDepth][kStride], with zeros past the last input. Pairs past the last one are
    // copies of it, and their sums are not stored.
    void stage(threadgroup F* tile, uint depth, constant MatmulParams& params) const {
      const uint column = depth + first;
      UNROLL for (int share = 0; share < kShares; ++share) {
        if ((share + 1) * kPairsApart > kPairs && pair + share * kPairsApart >= kPairs) continue;
        Elements<T, 8> octet = {};
        if (column < params.inputs) {
          octet = load_elements<8>(sources[share] + column, params.inputs - column, params.vectorised != 0);
        }
        UNROLL for (int i = 0; i < 8; ++i) {
          tile[target + tile_row(i) * kStride + share * kPairsApart] = F(octet.at(i));
        }
      }
    }
  };

  // The sums: kRowTiles x kPairTiles matrices of 8 rows x 8 pairs.
  struct Sums {
    simdgroup_matrix<float, 8, 8> sums[kRowTiles][kPairTiles];

    Sums() {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        UNROLL for (int p = 0; p < kPairTiles; ++p) {
          sums[r][p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
      }
    }

    // `own`: the lane's elements of the tile's first matrix.
    void add(thread Rows& rows, threadgroup const F* own) {
      UNROLL for (int k = 0; k < kDepth / 8; ++k) {
        simdgroup_matrix<F, 8, 8> values[kRowTiles];
        UNROLL for (int r = 0; r < kRowTiles; ++r) {
          const float2 two = W::values(rows.chunks[r], k);
          values[r].thread_elements()[0] = F(two.x);
          values[r].thread_elements()[1] = F(two.y);
        }
        UNROLL for (int p = 0; p < kPairTiles; ++p) {
          simdgroup_matrix<F, 8, 8> inputs;
          const vec<F, 2> two = *reinterpret_cast<threadgroup const vec<F, 2>*>(own + 8 * (k * kStride + p));
          inputs.thread_elements()[0] = two.x;
          inputs.thread_elements()[1] = two.y;
          UNROLL for (int r = 0; r < kRowTiles; ++r) {
            simdgroup_multiply_accumulate(sums[r][p], values[r], inputs, sums[r][p]);
          }
        }
      }
    }

    // Adds the bias, applies the activation and stores to the pairs' rows of `out`, eight pairs at a time.
    // The sums go through the simdgroup's part of `memory`, so that the code of the activation exists once.
    void store(threadgroup float* memory, TilePairs pairs, Outputs<T> out, uint expert, uint first,
               MatrixPlace place, uint lane, constant MatmulParams& params) const {
      constexpr uint kRows = 8 * kRowTiles;
      const bool plain = params.row_layout == ROWS_PLAIN;
      const uint outputs = outputs_of_rows(kRows, params), local = lane % outputs, output = first + local;
      threadgroup const float* own = memory + (plain ? local : local / 8 * 16 + local % 8);
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int r = 0; r < kRowTiles; ++r) {
          simdgroup_matrix<float, 8, 8> matrix = sums[r][p];
          UNROLL for (int j = 0; j < 2; ++j) {
            memory[(2 * place.quarter + j) * kRows + 8 * r + place.row] = matrix.thread_elements()[j];
          }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint pair = lane / outputs; pair < min(8u, pairs.count - 8 * p); pair += kSimdWidth / outputs) {
          if (output >= params.outputs) continue;
          threadgroup const float* sum = own + pair * kRows;
          out.store(sum[0], plain ? 0.0f : sum[8], pairs.at(8 * p + pair), expert, output, params);
        }
      }
    }
  };

  static void run(W weights, device const T* x, TilePairs pairs, Outputs<T> out, uint expert, uint first,
                  threadgroup F* tile, uint thread_index, uint lane, uint simdgroup,
                  constant MatmulParams& params) {
    const MatrixPlace place(lane);
    Rows rows(weights, first, place, params);
    const Inputs inputs(x, pairs, thread_index, params);
    Sums sums;
    for (uint depth = 0; depth < params.inputs; depth += kDepth) {
      rows.load(weights, depth + place.quarter * W::kTileValues, params.inputs);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile before this one has been read
      inputs.stage(tile, depth, params);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sums.add(rows, tile + place.row * kStride + 2 * place.quarter);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been read
    threadgroup float* memory = reinterpret_cast<threadgroup float*>(tile) + simdgroup * 64 * kRowTiles;
    sums.store(memory, pairs, out, expert, first, place, lane, params);
  }
};

// Grid: (blocks of rows, tiles). A tile, from moe_bucket, is (expert, first position in pair_order, pairs),
// with expert -1 for pairs without an expert, whose outputs become zero. Without ids tiles follow each other.
template <typename W, int kPairTiles>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void gemm(
    MATMUL_BUFFERS(typename W::Element), device const int* pair_order [[buffer(9)]],
    device const int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Tile<W, kPairTiles> Largest;
  constexpr int kBytes = Largest::kDepth * Largest::kStride * sizeof(typename Largest::F);
  constexpr int kSumBytes = Largest::kThreads / kSimdWidth * 64 * Largest::kRowTiles * sizeof(float);
  threadgroup float4 memory[(kBytes > kSumBytes ? kBytes : kSumBytes) / sizeof(float4)];
  threadgroup typename Largest::F* input_tile = reinterpret_cast<threadgroup typename Largest::F*>(memory);
  const uint block = outputs_of_rows(kGemmRows, params);
  const uint first_of_group = group.x * block, first = first_of_group + simdgroup * block / kGemmSimdgroups;
  const bool listed = params.has_ids != 0;
  int4 tile = int4(0, int(group.y) * Largest::kPairs, Largest::kPairs, 0);
  if (listed) tile = tiles[group.y];
  const TilePairs pairs = {pair_order, uint(tile.y), min(uint(tile.z), params.pairs - uint(tile.y)), listed};
  if (pairs.count == 0) return;
  if (tile.x < 0) {
    const uint columns = min(block, params.outputs - first_of_group);
    for (uint i = thread_index; i < pairs.count * columns; i += Largest::kThreads) {
      out[ulong(pairs.at(i / columns)) * params.outputs + first_of_group + i % columns] = 0;
    }
    return;
  }
  const W weights(packed, scales, biases, uint(tile.x), params);
#define RUN_TILE(pair_tiles)                                                                              \
  if constexpr (pair_tiles <= kPairTiles) {                                                               \
    if (pair_tiles == kPairTiles || pairs.count <= 8 * pair_tiles) {                                      \
      Tile<W, pair_tiles>::run(weights, x, pairs, {bias, residual, out}, uint(tile.x), first, input_tile, \
                               thread_index, lane, simdgroup, params);                                    \
      return;                                                                                             \
    }                                                                                                     \
  }
  RUN_TILE(1)
  RUN_TILE(2)
  RUN_TILE(3)
  RUN_TILE(4)
#undef RUN_TILE
}
