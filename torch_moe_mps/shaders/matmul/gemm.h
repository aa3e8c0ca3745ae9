// Matmuls for many pairs: tiles of up to 8 * kPairTiles pairs of one expert times rows of its matrix.
//
// A simdgroup dequantises its own rows straight into matrix fragments, so that each weight is dequantised
// once a tile and touches no threadgroup memory; the inputs go through it. That relies on the layout of an
// 8x8 matrix over the lanes, the same on every Apple GPU: a lane holds two neighbouring elements of a row,
// four lanes a row. The product is rows x pairs, so a lane's two elements are two inputs of a weight
// row. The format decides which two; the inputs are staged in its order.
//
// Where there are enough threadgroups, the simdgroups of one have different rows and stage the inputs
// together. Where there are few, they split the inputs: all have the same rows, each takes every fourth step
// with a tile of its own, so that none waits for another, and their sums are added at the end.
#pragma once
#include <metal_simdgroup_matrix>

#include "matmul/formats.h"
#include "matmul/tiles.h"

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

// What is staged: fragments if all simdgroups read them; else the inputs as they are, to save memory.
template <typename T, bool kSplit>
struct StagedOf {
  typedef typename FragmentOf<T>::type type;
};
template <typename T>
struct StagedOf<T, true> {
  typedef T type;
};

// A lane's place in a matrix of 8x8. Metal leaves it open; it is the same on all Apple GPUs up to now.
struct MatrixPlace {
  uint row;
  uint quarter;  // the lane's elements are in columns 2 * quarter and 2 *
                 // quarter + 1

  MatrixPlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};

// A thread of the threadgroup.
struct GemmThread {
  uint index, lane, simdgroup;
};

// The work of a threadgroup on up to 8 * kPairTiles pairs. The loop over the inputs has no branches:
// fragments past the last pair are left out by choosing a smaller kPairTiles.
template <typename W, int kPairTiles, bool kSplit>
struct Gemm {
  typedef typename W::Element T;
  typedef typename FragmentOf<T>::type F;
  typedef typename StagedOf<T, kSplit>::type Staged;
  typedef typename W::template Chunk<W::kTileValues> Chunk;
  static constant constexpr int kSimdgroupRows = kGemmRows / kGemmSimdgroups;
  static constant constexpr int kRowTiles = kSimdgroupRows / 8;
  static constant constexpr int kMostPairs = 8 * kPairTiles;
  static constant constexpr int kDepth = 4 * W::kTileValues;  // inputs of a step
  // Parts of a step that are staged one after the other, so that four tiles fit into threadgroup memory.
  static constant constexpr int kParts = kSplit && W::kTileValues > 16 ? W::kTileValues / 16 : 1;
  static constant constexpr int kStagedValues = W::kTileValues / kParts;  // of a chunk
  static constant constexpr int kStagedDepth = 4 * kStagedValues;
  static constant constexpr int kStride = kMostPairs + 4;  // of an input in threadgroup memory; not tuned
  static constant constexpr int kTile = kStagedDepth * kStride;
  static constant constexpr int kThreads = kGemmSimdgroups * kSimdWidth;
  // Simdgroups that share a tile, and those that share the sums of a row.
  static constant constexpr int kStagers = kSplit ? 1 : kGemmSimdgroups;
  static constant constexpr int kShares = kSplit ? kGemmSimdgroups : 1;
  static constant constexpr int kSums = 8 * kSimdgroupRows;  // of a simdgroup and 8 pairs

  static constant constexpr int kTileBytes = kGemmSimdgroups / kStagers * kTile * sizeof(Staged);
  static constant constexpr int kSumBytes = kGemmSimdgroups * kSums * sizeof(float);
  static constant constexpr int kBytes = kTileBytes > kSumBytes ? kTileBytes : kSumBytes;

  // Waits for those that share a tile.
  static void stagers_barrier() {
    if constexpr (kSplit) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // Waits for those that share the sums of a row.
  static void sharers_barrier() {
    if constexpr (kSplit) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

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
    static constant constexpr int kOctets = kStagedDepth / 8;                     // of a pair
    static constant constexpr int kPairsApart = kStagers * kSimdWidth / kOctets;  // of a thread's pairs
    static constant constexpr int kCopies = (kMostPairs + kPairsApart - 1) / kPairsApart;

    device const T* sources[kCopies];
    uint first;   // column of a step
    uint pair;    // the first of the thread's pairs
    uint target;  // its place in the tile

    Inputs(device const T* x, TilePairs pairs, GemmThread at, constant MatmulParams& params) {
      const uint index = kSplit ? at.lane : at.index;
      const uint octet = 8 * (index % kOctets), quarter = octet / kStagedValues;
      pair = index / kOctets;
      first = quarter * W::kTileValues + octet % kStagedValues;
      target = (tile_row(octet % kStagedValues) + 2 * quarter) * kStride + pair;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        const uint row = input_row(pairs.at(min(pair + copy * kPairsApart, pairs.count - 1)), params);
        sources[copy] = x + ulong(row) * params.inputs;
      }
    }

    // The row of the staged tile that holds a value. tile_row(a + b) == tile_row(a) + tile_row(b) where a is
    // a multiple of 8.
    static uint tile_row(int value) {
      const FragmentElement place = W::place_of(value);
      return 8 * place.number + place.element;
    }

    // Copies the inputs from `depth` on to [kStagedDepth][kStride], with zeros past the last input. Pairs
    // past the last one are copies of it, and their sums are not stored.
    void stage(threadgroup Staged* tile, uint depth, constant MatmulParams& params) const {
      const uint column = depth + first;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        if ((copy + 1) * kPairsApart > kMostPairs && pair + copy * kPairsApart >= kMostPairs) continue;
        Elements<T, 8> octet = {};
        if (column < params.inputs) {
          octet = load_elements<8>(sources[copy] + column, params.inputs - column, params.vectorised != 0);
        }
        UNROLL for (int i = 0; i < 8; ++i) {
          tile[target + tile_row(i) * kStride + copy * kPairsApart] = Staged(octet.at(i));
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
    void add(thread Rows& rows, int part, threadgroup const Staged* own) {
      UNROLL for (int k = 0; k < kStagedDepth / 8; ++k) {
        simdgroup_matrix<F, 8, 8> values[kRowTiles];
        UNROLL for (int r = 0; r < kRowTiles; ++r) {
          const float2 two = W::values(rows.chunks[r], part * (kStagedDepth / 8) + k);
          values[r].thread_elements()[0] = F(two.x);
          values[r].thread_elements()[1] = F(two.y);
        }
        UNROLL for (int p = 0; p < kPairTiles; ++p) {
          typedef vec<Staged, 2> Two;
          simdgroup_matrix<F, 8, 8> inputs;
          const Two two = *reinterpret_cast<threadgroup const Two*>(own + 8 * (k * kStride + p));
          inputs.thread_elements()[0] = F(two.x);
          inputs.thread_elements()[1] = F(two.y);
          UNROLL for (int r = 0; r < kRowTiles; ++r) {
            simdgroup_multiply_accumulate(sums[r][p], values[r], inputs, sums[r][p]);
          }
        }
      }
    }

    // Writes the sums of pair tile `p` to [8 pairs][kSimdgroupRows].
    void write(int p, threadgroup float* memory, MatrixPlace place) {
      UNROLL for (int r = 0; r < kRowTiles; ++r) {
        simdgroup_matrix<float, 8, 8> matrix = sums[r][p];
        UNROLL for (int j = 0; j < 2; ++j) {
          memory[(2 * place.quarter + j) * kSimdgroupRows + 8 * r + place.row] = matrix.thread_elements()[j];
        }
      }
    }
  };

  // Stores the outputs, eight pairs at a time, from the sums of all simdgroups that share the rows.
  static void store(thread Sums& sums, threadgroup float* memory, GemmWork<W> work, GemmThread at,
                    MatrixPlace place, constant MatmulParams& params) {
    constexpr uint kStorers = kShares * kSimdWidth;
    const bool plain = params.row_layout == ROWS_PLAIN;
    const uint outputs = outputs_of_rows(kSimdgroupRows, params);
    const uint storer = kSplit ? at.index : at.lane;
    const uint local = storer % outputs, output = work.first + local;
    threadgroup float* own = memory + at.simdgroup * kSums;
    threadgroup const float* row = (kSplit ? memory : own) + (plain ? local : local / 8 * 16 + local % 8);
    UNROLL for (int p = 0; p < kPairTiles; ++p) {
      sharers_barrier();
      sums.write(p, own, place);
      sharers_barrier();
      for (uint pair = storer / outputs; pair < min(8u, work.pairs.count - 8 * p);
           pair += kStorers / outputs) {
        if (output >= params.outputs) continue;
        threadgroup const float* sum = row + pair * kSimdgroupRows;
        float value = sum[0], up = plain ? 0.0f : sum[8];
        UNROLL for (int share = 1; share < kShares; ++share) {
          value += sum[share * kSums];
          if (!plain) up += sum[share * kSums + 8];
        }
        work.out.store(value, up, work.pairs.at(8 * p + pair), work.expert, output, params);
      }
    }
  }

  static void run(GemmWork<W> work, threadgroup float4* memory, GemmThread at,
                  constant MatmulParams& params) {
    const MatrixPlace place(at.lane);
    threadgroup Staged* tile = reinterpret_cast<threadgroup Staged*>(memory);
    if (kSplit) tile += at.simdgroup * kTile;
    Rows rows(work.weights, work.first, place, params);
    const Inputs inputs(work.x, work.pairs, at, params);
    Sums sums;
    for (uint depth = kSplit ? at.simdgroup * kDepth : 0; depth < params.inputs; depth += kShares * kDepth) {
      rows.load(work.weights, depth + place.quarter * W::kTileValues, params.inputs);
      UNROLL for (int part = 0; part < kParts; ++part) {
        stagers_barrier();  // the tile before this one has been read
        inputs.stage(tile, depth + part * kStagedValues, params);
        stagers_barrier();
        sums.add(rows, part, tile + place.row * kStride + 2 * place.quarter);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been read
    store(sums, reinterpret_cast<threadgroup float*>(memory), work, at, place, params);
  }
};

// Runs the Gemm with the fewest pair tiles, from kPairTiles on, that hold the pairs.
template <typename W, int kPairTiles, int kMostPairTiles, bool kSplit>
inline void run_gemm(GemmWork<W> work, threadgroup float4* memory, GemmThread at,
                     constant MatmulParams& params) {
  if constexpr (kPairTiles < kMostPairTiles) {
    if (work.pairs.count > 8 * kPairTiles) {
      run_gemm<W, kPairTiles + 1, kMostPairTiles, kSplit>(work, memory, at, params);
      return;
    }
  }
  Gemm<W, kPairTiles, kSplit>::run(work, memory, at, params);
}

// Grid: (blocks of rows, tiles).
template <typename W, int kPairTiles, bool kSplit>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void gemm(
    MATMUL_BUFFERS(typename W::Element), device const int* pair_order [[buffer(9)]],
    device const int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Gemm<W, kPairTiles, kSplit> Largest;
  threadgroup float4 memory[Largest::kBytes / sizeof(float4)];
  const PairTile tile = tile_of(tiles, pair_order, group.y, Largest::kMostPairs, params);
  if (tile.pairs.count == 0) return;
  const uint outputs = outputs_of_rows(Largest::kSimdgroupRows, params);
  const uint outputs_of_group = kSplit ? outputs : kGemmSimdgroups * outputs;
  const uint first = group.x * outputs_of_group;
  if (tile.expert < 0) {
    clear_outputs(out, tile.pairs, first, outputs_of_group, thread_index, Largest::kThreads, params);
    return;
  }
  const uint expert = uint(tile.expert);
  const GemmWork<W> work = {
      W(packed, scales, biases, expert, params), x, tile.pairs, {bias, residual, out, ids}, expert,
      first + (kSplit ? 0 : simdgroup * outputs)};
  run_gemm<W, 1, kPairTiles, kSplit>(work, memory, {thread_index, lane, simdgroup}, params);
}
