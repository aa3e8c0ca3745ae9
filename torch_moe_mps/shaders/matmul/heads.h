// A matrix for each head times what each head has of some tokens.
#pragma once
#include "matmul/columns.h"
#include "matmul/rows.h"

// Where the inputs of a head of a token begin.
template <typename T>
inline device const T* head_of_token(device const T* x, TokenStrides strides, uint token, uint head,
                                     constant HeadsParams& params) {
  return x + token_start(strides, token / params.tokens_of_batch, token % params.tokens_of_batch, head);
}

#define HEADS_BUFFERS(X, T)                                                               \
  device const X *x [[buffer(0)]], device const uchar *packed [[buffer(1)]],              \
      device const uchar *scales [[buffer(2)]], device const uchar *biases [[buffer(3)]], \
      device const T *tail [[buffer(4)]], device T *out [[buffer(5)]],                    \
      constant HeadsParams &params [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]], LANES

// Rows of a head's matrix times the inputs of up to M tokens. Inputs are in float32: they are the sums of
// latents, which attention has in float32, and rounded they would be less exact than expanded values are.
// Grid: (blocks of rows, heads, tokens / M).
template <typename W, int R, int M>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void heads_rows(
    HEADS_BUFFERS(float, typename W::Element)) {
  typedef typename W::Element T;
  constant MatmulParams& matrix = params.matrix;
  const uint first = (group.x * kSingleSimdgroups + simdgroup) * kRowGroups * R;
  if (first >= matrix.outputs) return;
  const uint head = group.y, token = group.z * M;
  device const float* source = head_of_token(x, params.x, token, head, params);
  PairSet<M> pairs;
  Sources<M> sources;
  UNROLL for (int m = 0; m < M; ++m) {
    const uint other = min(token + m, params.tokens - 1);
    pairs.v[m] = other * params.heads + head;
    sources.v[m] = uint(head_of_token(x, params.x, other, head, params) - source);
  }
  const W weights(packed, scales, biases, head, matrix);
  const RowBlock<W, R, float> block = row_block<R>(weights, source, head, first, lane, matrix);
  const Dots<R, M> dots = block.dots(sources, {0, 1}, matrix);
  const Outputs<T> outputs = {packed, out, out,
                              reinterpret_cast<device const int*>(x)};  // of which only out is used
  store_outputs<W, R, M>(block, dots, pairs, min(uint(M), params.tokens - token), outputs, matrix);
}

// The same with the matrices transposed. Grid: (slices of kHeadColumns columns, heads, tokens / M).
template <typename W, int M>
[[kernel, max_total_threads_per_threadgroup(kMatmulBound)]] void heads_columns(
    HEADS_BUFFERS(typename W::Element, typename W::Element)) {
  typedef typename W::Element T;
  constexpr uint kThreads = kHeadSimdgroups * kSimdWidth;
  threadgroup float shared[M * kHeadSimdgroups * kHeadColumns];
  constant MatmulParams& matrix = params.matrix;
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint head = group.y, token = group.z * M, tokens = min(uint(M), params.tokens - token);
  const uint first = group.x * kHeadColumns;
  RowNumbers<T, M> numbers;
  UNROLL for (int m = 0; m < M; ++m) {
    numbers.v[m] = head_of_token(x, params.x, min(token + m, params.tokens - 1), head, params);
  }
  add_columns<W, M>(W(packed, scales, biases, head, matrix), numbers, first, shared, lane, simdgroup, matrix);

  const uint width = matrix.inputs + params.tail_width;  // of a result
  for (uint i = thread_index; i < tokens * kHeadColumns; i += kThreads) {
    const uint m = i / kHeadColumns, local = i % kHeadColumns;
    if (first + local >= matrix.inputs) continue;
    const float sum = column_sum(shared, m, local);
    out[(ulong(token + m) * params.heads + head) * width + first + local] = T(sum);
  }
  if (group.x != 0) return;
  for (uint i = thread_index; i < tokens * params.tail_width; i += kThreads) {
    const uint m = i / params.tail_width, local = i % params.tail_width;
    out[(ulong(token + m) * params.heads + head) * width + matrix.inputs + local] =
        head_of_token(tail, params.tail, token + m, head, params)[local];
  }
}

#define INSTANTIATE_HEADS()                                                  \
  INSTANTIATE("heads_rows", heads_rows<Weights, kSingleRows, 1>)             \
  INSTANTIATE("heads_rows_few", heads_rows<Weights, kSingleRows, kFewPairs>) \
  INSTANTIATE("heads_columns", heads_columns<Weights, 1>)                    \
  INSTANTIATE("heads_columns_few", heads_columns<Weights, kFewPairs>)
