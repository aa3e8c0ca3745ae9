// Matmuls for many pairs: tiles of up to 8 * kPairTiles pairs of one expert times rows of its matrix.
//
// A simdgroup dequantises its own rows straight into matrix fragments, so that each weight is dequantised
// once a tile and touches no threadgroup memory. That relies on the layout of an 8x8 matrix over the lanes,
// the same on every Apple GPU: a lane holds two neighbouring elements of a row, four lanes a row. The product
// is rows x pairs, so a lane's two elements are two inputs of a weight row. Which two is free: the inputs
// come in the same order.
//
// Where there are enough threadgroups, the simdgroups of one have different rows and stage the inputs in
// threadgroup memory together. Where there are few, they split the inputs: all have the same rows, each takes
// every fourth step and loads its inputs straight into fragments, so that none waits for another, and their
// sums are added at the end.
#pragma once
#include <metal_simdgroup_matrix>

#include "common/simdgroups.h"
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

// A thread of the threadgroup.
struct GemmThread {
  uint index, lane, simdgroup;

  GemmThread again() const {
    const uint same = anew(index, lane);
    return {same, same % kSimdWidth, same / kSimdWidth};
  }
};

constant constexpr int kSimdgroupRows = kGemmRows / kGemmSimdgroups;
constant constexpr int kRowTiles = kSimdgroupRows / 8;
constant constexpr int kSumsOfSimdgroup = 8 * kSimdgroupRows;  // of 8 pairs
constant constexpr int kMostTileBytes = 32768;                 // of a threadgroup's memory

// The rows of a lane, one in each row tile of the simdgroup, with a chunk of kCount values of each. Gate and
// up rows alternate.
template <typename W, int kCount>
struct TileRows {
  typedef typename W::template Chunk<kCount> Chunk;

  typename W::Row starts[kRowTiles];
  Chunk chunks[kRowTiles];

  TileRows(W weights, uint first, MatrixPlace place, constant MatmulParams& params) {
    UNROLL for (int r = 0; r < kRowTiles; ++r) {
      const bool plain = params.row_layout == ROWS_PLAIN;
      const uint output = min(first + 8 * (plain ? r : r / 2) + place.row, params.outputs - 1);
      starts[r] = weights.row(weight_row(output, r % 2, params));
    }
  }

  // Zeros past the last input.
  void load(W weights, uint column, uint inputs) {
    UNROLL for (int r = 0; r < kRowTiles; ++r) chunks[r] = Chunk{};
    if (column >= inputs) return;
    UNROLL for (int r = 0; r < kRowTiles; ++r) {
      chunks[r] = weights.template load<kCount>(starts[r], column, inputs - column);
    }
  }
};

// A lane's elements of a fragment.
template <typename F>
inline simdgroup_matrix<F, 8, 8> fragment_of(F first, F second) {
  simdgroup_matrix<F, 8, 8> matrix;
  matrix.thread_elements()[0] = first;
  matrix.thread_elements()[1] = second;
  return matrix;
}

// The sums of a simdgroup: kRowTiles x kPairTiles matrices of 8 rows x 8 pairs.
template <typename F, int kPairTiles>
struct TileSums {
  typedef simdgroup_matrix<F, 8, 8> Fragment;
  simdgroup_matrix<float, 8, 8> sums[kRowTiles][kPairTiles];

  TileSums() {
    UNROLL for (int r = 0; r < kRowTiles; ++r) {
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        sums[r][p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
  }

  void add(int r, int p, Fragment values, Fragment inputs) {
    simdgroup_multiply_accumulate(sums[r][p], values, inputs, sums[r][p]);
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

// Waits for those that share the sums of a row.
template <bool kSplit>
inline void sharers_barrier() {
  if constexpr (kSplit) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Stores the outputs, eight pairs at a time. With kSplit, the sums of all simdgroups are shares of the same
// outputs.
template <bool kSplit, typename W, typename F, int kPairTiles>
inline void store_tile(thread TileSums<F, kPairTiles>& sums, threadgroup float* memory, GemmWork<W> work,
                       GemmThread at, constant MatmulParams& params) {
  const MatrixPlace place(at.lane);
  constexpr int kShares = kSplit ? kGemmSimdgroups : 1;
  constexpr uint kStorers = kShares * kSimdWidth;
  const bool plain = params.row_layout == ROWS_PLAIN;
  const uint outputs = outputs_of_rows(kSimdgroupRows, params);
  const uint storer = kSplit ? at.index : at.lane;
  const uint local = storer % outputs, output = work.first + local;
  threadgroup float* own = memory + at.simdgroup * kSumsOfSimdgroup;
  threadgroup const float* row = (kSplit ? memory : own) + (plain ? local : local / 8 * 16 + local % 8);
  UNROLL for (int p = 0; p < kPairTiles; ++p) {
    sharers_barrier<kSplit>();
    sums.write(p, own, place);
    sharers_barrier<kSplit>();
    for (uint pair = storer / outputs; pair < min(8u, work.pairs.count - 8 * p); pair += kStorers / outputs) {
      if (output >= params.outputs) continue;
      threadgroup const float* sum = row + pair * kSimdgroupRows;
      float value = sum[0], up = plain ? 0.0f : sum[8];
      UNROLL for (int share = 1; share < kShares; ++share) {
        value += sum[share * kSumsOfSimdgroup];
        if (!plain) up += sum[share * kSumsOfSimdgroup + 8];
      }
      work.out.store(value, up, work.pairs.at(8 * p + pair), work.expert, output, params);
    }
  }
}

// The work of a threadgroup on up to 8 * kPairTiles pairs. The loop over the inputs has no branches:
// fragments past the last pair are left out by choosing a smaller kPairTiles.
//
// With two buffers the inputs of a step are staged while others still read those before: one barrier a step.
// kUsedBuffers is 1 where two do not fit.
template <typename W, int kPairTiles, bool kSplit, int kBuffers>
struct Gemm;

template <typename W, int kPairTiles, int kBuffers>
struct Gemm<W, kPairTiles, false, kBuffers> {
  typedef typename W::Element T;
  typedef typename FragmentOf<T>::type F;
  typedef TileRows<W, W::kTileValues> Rows;
  typedef TileSums<F, kPairTiles> Sums;
  static constant constexpr bool kFits = true;
  static constant constexpr int kMostPairs = 8 * kPairTiles;
  static constant constexpr int kDepth = 4 * W::kTileValues;  // inputs of a step
  static constant constexpr int kStride = kMostPairs + 4;     // of an input in threadgroup memory; not tuned
  static constant constexpr int kTileBytes = kDepth * kStride * sizeof(F);
  static constant constexpr int kSumBytes = kGemmSimdgroups * kSumsOfSimdgroup * sizeof(float);
  static constant constexpr int kUsedBuffers = kBuffers * kTileBytes <= kMostTileBytes ? kBuffers : 1;
  static constant constexpr int kInputBytes = kUsedBuffers * kTileBytes;
  static constant constexpr int kBytes = kInputBytes > kSumBytes ? kInputBytes : kSumBytes;

  // The part of the inputs that a thread copies: eight columns of some pairs.
  struct Inputs {
    static constant constexpr int kOctets = kDepth / 8;  // of a pair
    // Places of a thread's pairs
    static constant constexpr int kPairsApart = kGemmSimdgroups * kSimdWidth / kOctets;
    static constant constexpr int kCopies = (kMostPairs + kPairsApart - 1) / kPairsApart;

    device const T* sources[kCopies];
    uint first;   // column of a step
    uint pair;    // the first of the thread's pairs
    uint target;  // its place in the tile

    Inputs(device const T* x, TilePairs pairs, GemmThread at, constant MatmulParams& params) {
      const uint quarter = at.index % kOctets * 8 / W::kTileValues;
      first = at.index % kOctets * 8;
      pair = at.index / kOctets;
      target = (tile_row(first % W::kTileValues) + 2 * quarter) * kStride + pair;
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

    // Copies the inputs from `depth` on to [kDepth][kStride], with zeros past the last input. Pairs past the
    // last one are copies of it, and their sums are not stored.
    void stage(threadgroup F* tile, uint depth, constant MatmulParams& params) const {
      const uint column = depth + first;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        if ((copy + 1) * kPairsApart > kMostPairs && pair + copy * kPairsApart >= kMostPairs) continue;
        Elements<T, 8> octet = {};
        if (column < params.inputs) {
          octet = load_elements<8>(sources[copy] + column, params.inputs - column, params.vectorised != 0);
        }
        UNROLL for (int i = 0; i < 8; ++i) {
          tile[target + tile_row(i) * kStride + copy * kPairsApart] = F(octet.at(i));
        }
      }
    }
  };

  // Adds the products of the weights' fragments `k`. `own`: the lane's elements of the tile's first matrix.
  static void multiply(thread Sums& sums, thread Rows& rows, threadgroup const F* own, int k) {
    simdgroup_matrix<F, 8, 8> values[kRowTiles];
    UNROLL for (int r = 0; r < kRowTiles; ++r) {
      const float2 two = W::values(rows.chunks[r], k);
      values[r] = fragment_of(F(two.x), F(two.y));
    }
    UNROLL for (int p = 0; p < kPairTiles; ++p) {
      typedef vec<F, 2> Two;
      const Two two = *reinterpret_cast<threadgroup const Two*>(own + 8 * (k * kStride + p));
      UNROLL for (int r = 0; r < kRowTiles; ++r) sums.add(r, p, values[r], fragment_of(two.x, two.y));
    }
  }

  static void run(GemmWork<W> work, threadgroup float4* memory, GemmThread at,
                  constant MatmulParams& params) {
    const MatrixPlace place(at.lane);
    threadgroup F* tile = reinterpret_cast<threadgroup F*>(memory);
    threadgroup const F* own = tile + place.row * kStride + 2 * place.quarter;
    Rows rows(work.weights, work.first, place, params);
    const Inputs inputs(work.x, work.pairs, at, params);
    Sums sums;
    uint offset = 0;  // of the step's buffer
    for (uint depth = 0; depth < params.inputs; depth += kDepth) {
      rows.load(work.weights, depth + place.quarter * W::kTileValues, params.inputs);
      // The tile before this one has been read; of two, by a step before.
      if constexpr (kBuffers == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
      inputs.stage(tile + offset, depth, params);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int k = 0; k < kDepth / 8; ++k) multiply(sums, rows, own + offset, k);
      if constexpr (kBuffers > 1) offset = kDepth * kStride - offset;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been read
    store_tile<false>(sums, reinterpret_cast<threadgroup float*>(memory), work, at.again(), params);
  }
};

// For quantised weights. Of each pack of a row, a lane's first elements are one half and its second elements
// the other: so it loads runs of neighbouring inputs of its pairs.
template <typename W, int kPairTiles>
struct Gemm<W, kPairTiles, true, 1> {
  typedef typename W::Element T;
  typedef typename FragmentOf<T>::type F;
  typedef simdgroup_matrix<F, 8, 8> Fragment;
  typedef TileRows<W, W::kValues> Rows;
  typedef TileSums<F, kPairTiles> Sums;
  static constant constexpr int kDepth = 4 * W::kValues;  // inputs of a step
  static constant constexpr int kRun = W::kPackSize / 2;  // fragments of a pack
  static constant constexpr int kUsedBuffers = 1;
  static constant constexpr int kBytes = kGemmSimdgroups * kSumsOfSimdgroup * sizeof(float);
  // A lane's weights and inputs of a step, as loaded and as fragments. With more bytes and more than two pair
  // tiles a thread needs more than 128 registers, by the cost model.
  static constant constexpr int kStepBytes = kRowTiles * sizeof(typename Rows::Chunk) + W::kPlaceBytes +
                                             2 * kPairTiles * kRun * (sizeof(T) + sizeof(F));
  static constant constexpr bool kFits = kPairTiles <= 2 || kStepBytes <= 288;

  // The inputs of a lane: a run of each of its pairs, which are two in each pair tile.
  struct Inputs {
    typedef Elements<T, kRun> Run;

    device const T* x;
    uint starts[kPairTiles][2];
    Run runs[kPairTiles][2];

    // Pairs past the last one are copies of it, and their sums are not stored.
    Inputs(device const T* x_, TilePairs pairs, MatrixPlace place, constant MatmulParams& params) : x(x_) {
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        UNROLL for (int j = 0; j < 2; ++j) {
          const uint pair = min(8 * p + 2 * place.quarter + j, pairs.count - 1);
          starts[p][j] = input_row(pairs.at(pair), params) * params.inputs;
        }
      }
    }

    // Zeros past the last input.
    void load(uint column, uint inputs) {
      UNROLL for (int p = 0; p < kPairTiles; ++p) runs[p][0] = runs[p][1] = Run{};
      if (column >= inputs) return;
      UNROLL for (int p = 0; p < kPairTiles; ++p) {
        UNROLL for (int j = 0; j < 2; ++j) {
          runs[p][j] = load_elements<kRun>(x + (starts[p][j] + column), inputs - column, true);
        }
      }
    }

    Fragment matrix(int p, int k) const { return fragment_of(F(runs[p][0].at(k)), F(runs[p][1].at(k))); }
  };

  // Adds the products of the two fragments that code pairs `k` and `k + kRun / 2` of a pack fill.
  static void multiply(thread Sums& sums, Rows rows, Inputs inputs, int pack, int k) {
    UNROLL for (int r = 0; r < kRowTiles; ++r) {
      const int pair = pack * kRun + k;
      const float2 pairs[2] = {W::values(rows.chunks[r], pair), W::values(rows.chunks[r], pair + kRun / 2)};
      UNROLL for (int i = 0; i < kRun; ++i) {
        const FragmentElement first = W::place_of(i), second = W::place_of(i + kRun);
        if (first.number % (kRun / 2) != k) continue;
        const Fragment values = fragment_of(F(pairs[first.number / (kRun / 2)][first.element]),
                                            F(pairs[second.number / (kRun / 2)][second.element]));
        UNROLL for (int p = 0; p < kPairTiles; ++p) sums.add(r, p, values, inputs.matrix(p, i));
      }
    }
  }

  static void run(GemmWork<W> work, threadgroup float4* memory, GemmThread at,
                  constant MatmulParams& params) {
    const MatrixPlace place(at.lane);
    const uint run = place.row / 2 * W::kValues + place.row % 2 * kRun;
    Rows rows(work.weights, work.first, place, params);
    Inputs inputs(work.x, work.pairs, place, params);
    Sums sums;
    for (uint depth = at.simdgroup * kDepth; depth < params.inputs; depth += kGemmSimdgroups * kDepth) {
      rows.load(work.weights, depth + place.quarter * W::kValues, params.inputs);
      UNROLL for (int pack = 0; pack < W::kValues / W::kPackSize; ++pack) {
        inputs.load(depth + run + pack * W::kPackSize, params.inputs);
        UNROLL for (int k = 0; k < kRun / 2; ++k) multiply(sums, rows, inputs, pack, k);
      }
    }
    store_tile<true>(sums, reinterpret_cast<threadgroup float*>(memory), work, at, params);
  }
};

// Runs the Gemm with the fewest pair tiles, from kPairTiles on, that hold the pairs.
template <typename W, int kPairTiles, int kMostPairTiles, bool kSplit, int kBuffers>
inline void run_gemm(GemmWork<W> work, threadgroup float4* memory, GemmThread at,
                     constant MatmulParams& params) {
  if constexpr (kPairTiles < kMostPairTiles) {
    if (work.pairs.count > 8 * kPairTiles) {
      run_gemm<W, kPairTiles + 1, kMostPairTiles, kSplit, kBuffers>(work, memory, at, params);
      return;
    }
  }
  Gemm<W, kPairTiles, kSplit, kBuffers>::run(work, memory, at, params);
}

// Grid: (blocks of rows, tiles).
template <typename W, int kPairTiles, bool kSplit, int kBuffers = 1>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void gemm(
    MATMUL_BUFFERS(typename W::Element), device const int* pair_order [[buffer(9)]],
    device const int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES) {
  // Pairs whose inputs do not fit into registers are taken in two turns.
  constexpr bool kFits = Gemm<W, kPairTiles, kSplit, kBuffers>::kFits;
  constexpr int kAtOnce = kFits ? kPairTiles : kPairTiles / 2;
  typedef Gemm<W, kAtOnce, kSplit, kBuffers> Largest;
  constexpr int kUsedBuffers = Largest::kUsedBuffers;  // also for fewer pairs
  threadgroup float4 memory[Largest::kBytes / sizeof(float4)];
  const bool listed = !kSplit && params.has_ids != 0;
  const PairTile tile = tile_of(tiles, pair_order, listed, group.y, 8 * kPairTiles, params);
  if (tile.pairs.count == 0) return;
  const uint outputs = outputs_of_rows(kSimdgroupRows, params);
  const uint outputs_of_group = kSplit ? outputs : kGemmSimdgroups * outputs;
  const uint first = group.x * outputs_of_group;
  if (tile.expert < 0) {
    clear_outputs(out, tile.pairs, first, outputs_of_group, thread_index, kGemmSimdgroups * kSimdWidth,
                  params);
    return;
  }
  const uint expert = uint(tile.expert);
  const GemmWork<W> work = {
      W(packed, scales, biases, expert, params), x, tile.pairs, {bias, residual, out, ids}, expert,
      first + (kSplit ? 0 : simdgroup * outputs)};
  const GemmThread at = {thread_index, lane, simdgroup};
  if constexpr (kFits) {
    run_gemm<W, 1, kPairTiles, kSplit, kUsedBuffers>(work, memory, at, params);
  } else {
    for (uint start = 0; start < tile.pairs.count; start += 8 * kAtOnce) {
      GemmWork<W> part = work;
      part.pairs.first += start;
      part.pairs.count = min(tile.pairs.count - start, uint(8 * kAtOnce));
      run_gemm<W, 1, kAtOnce, kSplit, kUsedBuffers>(part, memory, at, params);
    }
  }
}
