// Matmuls for many pairs on the tensor units of the M5 and later: tiles as in gemm.h, of up to kPairs pairs
// of one expert times kTensorRows rows of its matrix.
//
// The threads of a threadgroup decode the weights of a step together, and copy its inputs, into threadgroup
// memory; matmul2d multiplies them there. Nothing depends on which thread has which element of a cooperative
// tensor: Metal leaves that to each GPU.
#pragma once
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include <metal_tensor>

#include "matmul/formats.h"
#include "matmul/tiles.h"

// A matrix in threadgroup memory. Its size begins with the innermost dimension: (columns, rows).
typedef dextents<int32_t, 2> TensorSize;
template <typename T>
using ThreadgroupTensor = tensor<threadgroup T, TensorSize, tensor_inline>;

// The work of a threadgroup on up to kPairs pairs. The units multiply whole multiples of 16 pairs.
template <typename W, int kPairs>
struct TensorGemm {
  typedef typename W::Element T;
  static constant constexpr int kThreads = kTensorThreads;
  static constant constexpr int kDepth = kTensorDepth;
  static constant constexpr int kWeights = kTensorRows * kDepth;
  static constant constexpr int kTileBytes = (kTensorRows + kPairs) * kDepth * sizeof(T);
  static constant constexpr int kSumBytes = kTensorRows * kPairs * sizeof(float);
  static constant constexpr int kBytes = kTileBytes > kSumBytes ? kTileBytes : kSumBytes;

  // The weights that a thread decodes in each step: a run of one row. Gate rows come before up rows.
  struct RowRun {
    static constant constexpr int kLength = kWeights / kThreads;
    static constant constexpr int kRunsOfRow = kDepth / kLength;
    static constant constexpr int kChunk = W::kTileValues;
    typedef typename W::template Chunk<kChunk> Chunk;

    typename W::Row row;
    uint first;   // column of a step
    uint target;  // in the tile, in octets

    RowRun(W weights, uint first_output, uint thread_index, constant MatmulParams& params) {
      const uint number = thread_index / kRunsOfRow, outputs = outputs_of_rows(kTensorRows, params);
      const uint output = min(first_output + number % outputs, params.outputs - 1);
      row = weights.row(weight_row(output, number / outputs, params));
      first = thread_index % kRunsOfRow * kLength;
      target = thread_index * (kLength / 8);
    }

    // Writes the weights from `depth` on to [kTensorRows][kDepth], with zeros past the last input.
    void stage(threadgroup uint4* tile, W weights, uint depth, constant MatmulParams& params) const {
      UNROLL for (int part = 0; part < kLength / kChunk; ++part) {
        const uint column = depth + first + part * kChunk;
        Chunk chunk = {};
        if (column < params.inputs) {
          chunk = weights.template load<kChunk>(row, column, params.inputs - column);
        }
        float2 pairs[kChunk / 2];
        UNROLL for (int i = 0; i < kChunk / 2; ++i) pairs[i] = W::values(chunk, i);
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

  // The inputs that a thread copies in each step: eight columns of some pairs.
  struct Inputs {
    static constant constexpr int kOctets = kDepth / 8;  // of a pair
    static constant constexpr int kPairsApart = kThreads / kOctets;
    static constant constexpr int kCopies = kPairs / kPairsApart;

    device const T* sources[kCopies];
    uint first;   // column of a step
    uint target;  // in the tile, in octets

    Inputs(device const T* x, TilePairs pairs, uint thread_index, constant MatmulParams& params) {
      first = 8 * (thread_index % kOctets);
      target = thread_index;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        const uint pair = thread_index / kOctets + copy * kPairsApart;
        sources[copy] = x + ulong(input_row(pairs.at(min(pair, pairs.count - 1)), params)) * params.inputs;
      }
    }

    // Copies the inputs from `depth` on to [kPairs][kDepth], with zeros past the last input. Pairs past the
    // last one are copies of it, and their sums are not stored.
    void stage(threadgroup uint4* tile, uint depth, constant MatmulParams& params) const {
      const uint column = depth + first;
      UNROLL for (int copy = 0; copy < kCopies; ++copy) {
        Elements<T, 8> octet = {};
        if (column < params.inputs) {
          octet = load_elements<8>(sources[copy] + column, params.inputs - column, params.vectorised != 0);
        }
        uint4 words;
        UNROLL for (int i = 0; i < 4; ++i) words[i] = octet.words.v[i];
        tile[target + copy * kThreads] = words;
      }
    }
  };

  // Stores the outputs from their sums, [kPairs][kTensorRows].
  static void store(threadgroup const float* sums, GemmWork<W> work, uint thread_index,
                    constant MatmulParams& params) {
    const uint outputs = outputs_of_rows(kTensorRows, params);
    const uint local = thread_index % outputs, output = work.first + local;
    if (output >= params.outputs) return;
    for (uint pair = thread_index / outputs; pair < work.pairs.count; pair += kThreads / outputs) {
      threadgroup const float* sum = sums + pair * kTensorRows + local;
      const float up = params.row_layout == ROWS_PLAIN ? 0.0f : sum[outputs];
      work.out.store(sum[0], up, work.pairs.at(pair), work.expert, output, params);
    }
  }

  // Every thread of the threadgroup has to arrive at the product: `work` is the same for all of them.
  static void run(GemmWork<W> work, threadgroup uint4* memory, uint thread_index,
                  constant MatmulParams& params) {
    threadgroup uint4* weights = memory;
    threadgroup uint4* inputs = memory + kWeights / 8;
    threadgroup float* results = reinterpret_cast<threadgroup float*>(memory);
    const RowRun rows(work.weights, work.first, thread_index, params);
    const Inputs copies(work.x, work.pairs, thread_index, params);

    constexpr auto product =
        mpp::tensor_ops::matmul2d_descriptor(kPairs, kTensorRows, kDepth, false, true, false,
                                             mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    mpp::tensor_ops::matmul2d<product, execution_simdgroups<kTensorSimdgroups>> multiply;
    // Named, not decltype(left): from MSL 4.1 on that has the address space of the variable (mlx#4533).
    typedef ThreadgroupTensor<T> Operand;
    Operand left(reinterpret_cast<threadgroup T*>(inputs), TensorSize(kDepth, kPairs));
    Operand right(reinterpret_cast<threadgroup T*>(weights), TensorSize(kDepth, kTensorRows));
    auto sums = multiply.template get_destination_cooperative_tensor<Operand, Operand, float>();
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;

    for (uint depth = 0; depth < params.inputs; depth += kDepth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles before these have been read
      rows.stage(weights, work.weights, depth, params);
      copies.stage(inputs, depth, params);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply.run(left, right, sums);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tiles have been read
    ThreadgroupTensor<float> to(results, TensorSize(kTensorRows, kPairs));
    sums.store(to);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store(results, work, thread_index, params);
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
