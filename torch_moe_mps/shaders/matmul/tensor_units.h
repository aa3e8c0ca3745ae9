// Matmuls for many pairs on the tensor units of the M5 and later: tiles as in gemm.h, of up to kPairs pairs
// of one expert times kTensorRows rows of its matrix.
//
// The threads of a threadgroup decode the weights of a step together into threadgroup memory; matmul2d
// multiplies them there with the inputs, which are copied beside them: no kernel of torch, MLX or llama.cpp
// multiplies bfloat16 in device memory with bfloat16 in threadgroup memory. Rows in threadgroup memory are 16
// bytes apart, so that they start in other banks. Nothing depends on which thread has which element of a
// cooperative tensor: Metal leaves that to each GPU.
#pragma once
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include <metal_tensor>

#include "matmul/formats.h"
#include "matmul/tiles.h"

// A matrix in memory. Its size begins with the innermost dimension: (columns, rows). Apple's
// MPPTensorOpsMatMul2d.h: operands whose size is known to the compiler are not checked for edges in each
// product.
template <int kColumns, int kRows>
using TileSize = extents<int32_t, kColumns, kRows>;
template <typename T, int kColumns, int kRows>
using ThreadgroupTensor = tensor<threadgroup T, TileSize<kColumns, kRows>, tensor_inline>;

constant constexpr int kTensorStride = kTensorDepth + 8;  // elements from row to row, in threadgroup memory
constant constexpr int kStrideOctets = kTensorStride / 8;

// An operand in threadgroup memory: as many columns as a product has inputs.
template <typename T, int kRows>
using StagedTensor = ThreadgroupTensor<T, kTensorDepth, kRows>;

template <typename T, int kRows>
inline StagedTensor<T, kRows> staged(threadgroup uint4* memory) {
  return StagedTensor<T, kRows>(reinterpret_cast<threadgroup T*>(memory), TileSize<kTensorDepth, kRows>(),
                                array<int32_t, 2>{1, kTensorStride});
}

// The weights that a thread decodes in each step: a run of one row. Gate rows come before up rows.
template <typename W>
struct RowRun {
  typedef typename W::Element T;
  static constant constexpr int kLength = kTensorRows * kTensorDepth / kTensorThreads;
  static constant constexpr int kRunsOfRow = kTensorDepth / kLength;
  static constant constexpr int kChunk = W::kTileValues;
  static constant constexpr int kChunks = kLength / kChunk;
  typedef typename W::template Chunk<kChunk> Chunk;
  struct Chunks {
    Chunk v[kChunks];
  };

  typename W::Row row;
  uint first;   // column of a step
  uint target;  // in the tile, in octets

  RowRun(W weights, uint first_output, uint thread_index, constant MatmulParams& params) {
    const uint number = thread_index / kRunsOfRow, outputs = outputs_of_rows(kTensorRows, params);
    const uint output = min(first_output + number % outputs, params.outputs - 1);
    row = weights.row(weight_row(output, number / outputs, params));
    first = thread_index % kRunsOfRow * kLength;
    target = number * kStrideOctets + first / 8;
  }

  // The weights of the step from `depth` on, with zeros past the last input.
  Chunks load(W weights, uint depth, constant MatmulParams& params) const {
    Chunks chunks;
    UNROLL for (int part = 0; part < kChunks; ++part) {
      const uint column = depth + first + part * kChunk;
      Chunk chunk = {};
      if (column < params.inputs) {
        chunk = weights.template load<kChunk>(row, column, params.inputs - column);
      }
      chunks.v[part] = chunk;
    }
    return chunks;
  }

  // Decodes them to [kTensorRows][kTensorStride].
  void decode(threadgroup uint4* tile, Chunks chunks) const {
    UNROLL for (int part = 0; part < kChunks; ++part) {
      float2 pairs[kChunk / 2];
      UNROLL for (int i = 0; i < kChunk / 2; ++i) pairs[i] = W::values(chunks.v[part], i);
      const Pack<kChunk> values = in_order<kChunk, W>(pairs);
      UNROLL for (int octet = 0; octet < kChunk / 8; ++octet) {
        uint4 words;
        UNROLL for (int i = 0; i < 4; ++i) {
          const int value = 8 * octet + 2 * i;
          words[i] = word_of(vec<T, 2>(T(values.v[value]), T(values.v[value + 1])));
        }
        tile[target + part * (kChunk / 8) + octet] = words;
      }
    }
  }
};

template <typename Sums>
inline void clear_sums(thread Sums& sums) {
  UNROLL for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;
}

// Stores the outputs of a tile from their sums, by way of [kPairs][kTensorRows] in threadgroup memory.
template <int kPairs, typename W, typename Sums>
inline void store_product(thread Sums& sums, GemmWork<W> work, threadgroup float* memory, uint thread_index,
                          constant MatmulParams& params) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // what was there has been read
  ThreadgroupTensor<float, kTensorRows, kPairs> to(memory, TileSize<kTensorRows, kPairs>());
  sums.store(to);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint outputs = outputs_of_rows(kTensorRows, params);
  const uint local = thread_index % outputs, output = work.first + local;
  if (output >= params.outputs) return;
  for (uint pair = thread_index / outputs; pair < work.pairs.count; pair += kTensorThreads / outputs) {
    threadgroup const float* sum = memory + pair * kTensorRows + local;
    const float up = params.row_layout == ROWS_PLAIN ? 0.0f : sum[outputs];
    work.out.store(sum[0], up, work.pairs.at(pair), work.expert, output, params);
  }
}

// The work of a threadgroup on up to kPairs pairs of a list. The units multiply whole multiples of 16 pairs.
template <typename W, int kPairs>
struct TensorGemm {
  typedef typename W::Element T;
  static constant constexpr int kTileBytes = (kTensorRows + kPairs) * kTensorStride * sizeof(T);
  static constant constexpr int kSumBytes = kTensorRows * kPairs * sizeof(float);
  static constant constexpr int kBytes = kTileBytes > kSumBytes ? kTileBytes : kSumBytes;

  // The inputs that a thread copies in each step: eight columns of some pairs.
  struct Inputs {
    static constant constexpr int kOctets = kTensorDepth / 8;  // of a pair
    static constant constexpr int kPairsApart = kTensorThreads / kOctets;
    static constant constexpr int kCopies = kPairs / kPairsApart;

    device const T* sources[kCopies];
    uint first;   // column of a step
    uint target;  // in the tile, in octets

    Inputs(device const T* x, TilePairs pairs, uint thread_index, constant MatmulParams& params) {
      first = 8 * (thread_index % kOctets);
      target = thread_index / kOctets * kStrideOctets + thread_index % kOctets;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        const uint pair = thread_index / kOctets + copy * kPairsApart;
        sources[copy] = x + ulong(input_row(pairs.at(min(pair, pairs.count - 1)), params)) * params.inputs;
      }
    }

    // Copies the inputs from `depth` on to [kPairs][kTensorStride], with zeros past the last input. Pairs
    // past the last one are copies of it, and their sums are not stored.
    void stage(threadgroup uint4* tile, uint depth, constant MatmulParams& params) const {
      const uint column = depth + first;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        Elements<T, 8> octet = {};
        if (column < params.inputs) {
          octet = load_elements<8>(sources[copy] + column, params.inputs - column, params.vectorised != 0);
        }
        uint4 words;
        UNROLL for (int i = 0; i < 4; ++i) words[i] = octet.words.v[i];
        tile[target + copy * kPairsApart * kStrideOctets] = words;
      }
    }
  };

  // Every thread of the threadgroup has to arrive at the product: `work` is the same for all of them.
  static void run(GemmWork<W> work, threadgroup uint4* memory, uint thread_index,
                  constant MatmulParams& params) {
    threadgroup uint4* weights = memory;
    threadgroup uint4* inputs = memory + kTensorRows * kStrideOctets;
    const RowRun<W> rows(work.weights, work.first, thread_index, params);
    const Inputs copies(work.x, work.pairs, thread_index, params);

    constexpr auto product =
        mpp::tensor_ops::matmul2d_descriptor(kPairs, kTensorRows, kTensorDepth, false, true, false,
                                             mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    mpp::tensor_ops::matmul2d<product, execution_simdgroups<kTensorSimdgroups>> multiply;
    // Named, not decltype(left): from MSL 4.1 on that has the address space of the variable (mlx#4533).
    typedef StagedTensor<T, kPairs> Left;
    typedef StagedTensor<T, kTensorRows> Right;
    Left left = staged<T, kPairs>(inputs);
    Right right = staged<T, kTensorRows>(weights);
    auto sums = multiply.template get_destination_cooperative_tensor<Left, Right, float>();
    clear_sums(sums);
    for (uint depth = 0; depth < params.inputs; depth += kTensorDepth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles before these have been read
      rows.decode(weights, rows.load(work.weights, depth, params));
      copies.stage(inputs, depth, params);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply.run(left, right, sums);
    }
    threadgroup float* results = reinterpret_cast<threadgroup float*>(memory);
    store_product<kPairs>(sums, work, results, thread_index, params);
  }
};

// Runs the TensorGemm with the fewest pairs, from kPairs on, that holds those of the tile.
template <typename W, int kPairs, int kMostPairs>
inline void run_tensor_gemm(GemmWork<W> work, threadgroup uint4* memory, uint thread_index,
                            constant MatmulParams& params) {
  if constexpr (kPairs < kMostPairs) {
    if (work.pairs.count > kPairs) {
      run_tensor_gemm<W, 2 * kPairs, kMostPairs>(work, memory, thread_index, params);
      return;
    }
  }
  TensorGemm<W, kPairs>::run(work, memory, thread_index, params);
}

// Grid: (blocks of rows, tiles).
template <typename W, int kPairs>
[[kernel, max_total_threads_per_threadgroup(kTensorThreads)]] void tensor_gemm(
    MATMUL_BUFFERS(typename W::Element), device const int* pair_order [[buffer(9)]],
    device const int4* tiles [[buffer(10)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef TensorGemm<W, kPairs> Largest;
  threadgroup uint4 memory[Largest::kBytes / sizeof(uint4)];
  const PairTile tile = tile_of(tiles, pair_order, params.has_ids != 0, group.y, kPairs, params);
  if (tile.pairs.count == 0) return;
  const uint outputs = outputs_of_rows(kTensorRows, params), first = group.x * outputs;
  if (tile.expert < 0) {
    clear_outputs(out, tile.pairs, first, outputs, thread_index, kTensorThreads, params);
    return;
  }
  const uint expert = uint(tile.expert);
  const GemmWork<W> work = {
      W(packed, scales, biases, expert, params), x, tile.pairs, {bias, residual, out, ids}, expert, first};
  run_tensor_gemm<W, 16, kPairs>(work, memory, thread_index, params);
}
