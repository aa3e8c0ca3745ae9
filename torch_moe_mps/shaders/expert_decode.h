// Expert matmuls for few pairs: matrix times vector, a simdgroup to a few rows.
#pragma once
#include "expert_common.h"
#include "expert_formats.h"

template <int R>
struct RowSet {
  uint v[R];
};

// Where the inputs of M pairs start, in elements of x: in registers where they are few.
template <int M>
struct Sources {
  uint v[M];
  uint at(int m) const { return v[m]; }
};

struct ManySources {
  threadgroup const uint* v;
  uint at(int m) const { return v[m]; }
};

template <int R, int M>
struct Dots {
  float v[R][M];
};

// One or two pairs: the codes are multiplied, and scale and bias applied once per chunk. The inputs of the
// whole chunk are loaded before anything waits for the weights.
template <typename W, int R, int M, typename S>
inline void add_chunk_few(W weights, thread typename W::Chunk* chunks, device const typename W::Element* x,
                          S sources, uint column, uint left, bool vectorised, thread Dots<R, M>& dots) {
  Octet<typename W::Element> inputs[W::kOctets][M];
  UNROLL for (int o = 0; o < W::kOctets; ++o) {
    UNROLL for (int m = 0; m < M; ++m) {
      inputs[o][m] = load_octet(x + sources.at(m) + column + 8 * o, left - 8 * o, vectorised);
    }
  }
  InputSums sums[M];
  const InputSums none = {{0.0f, 0.0f}};
  UNROLL for (int m = 0; m < M; ++m) sums[m] = none;
  Dots<R, M> codes;
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int m = 0; m < M; ++m) codes.v[r][m] = 0.0f;
  }
  UNROLL for (int o = 0; o < W::kOctets; ++o) {
    Pack<8> values[M];
    UNROLL for (int m = 0; m < M; ++m) values[m] = W::coded(inputs[o][m].values(), sums[m]);
    UNROLL for (int r = 0; r < R; ++r) {
      const Pack<8> row = weights.codes(chunks[r], o);
      UNROLL for (int m = 0; m < M; ++m) {
        UNROLL for (int i = 0; i < 8; ++i) codes.v[r][m] = fma(row.v[i], values[m].v[i], codes.v[r][m]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int m = 0; m < M; ++m) dots.v[r][m] += weights.scaled(chunks[r], codes.v[r][m], sums[m]);
  }
}

// More pairs: each value is dequantised once for all of them.
template <typename W, int R, int M, typename S>
inline void add_chunk(W weights, thread typename W::Chunk* chunks, device const typename W::Element* x,
                      S sources, uint pairs, uint column, uint left, bool vectorised,
                      thread Dots<R, M>& dots) {
  UNROLL for (int o = 0; o < W::kOctets; ++o) {
    Pack<8> rows[R];
    UNROLL for (int r = 0; r < R; ++r) rows[r] = weights.octet(chunks[r], o);
    UNROLL for (int m = 0; m < M; ++m) {
      if (uint(m) < pairs) {
        const Pack<8> input =
            load_octet(x + sources.at(m) + column + 8 * o, left - 8 * o, vectorised).values();
        UNROLL for (int r = 0; r < R; ++r) {
          UNROLL for (int i = 0; i < 8; ++i) dots.v[r][m] = fma(rows[r].v[i], input.v[i], dots.v[r][m]);
        }
      }
    }
  }
}

// Very many: one row, whose values are all kept, so that a pair's inputs are addressed once per chunk.
template <typename W, int M, typename S>
inline void add_chunk_row(W weights, typename W::Chunk chunk, device const typename W::Element* x, S sources,
                          uint pairs, uint column, uint left, bool vectorised, thread Dots<1, M>& dots) {
  Pack<8> row[W::kOctets];
  UNROLL for (int o = 0; o < W::kOctets; ++o) row[o] = weights.octet(chunk, o);
  UNROLL for (int m = 0; m < M; ++m) {
    if (uint(m) < pairs) {
      device const typename W::Element* source = x + sources.at(m) + column;
      UNROLL for (int o = 0; o < W::kOctets; ++o) {
        const Pack<8> input = load_octet(source + 8 * o, left - 8 * o, vectorised).values();
        UNROLL for (int i = 0; i < 8; ++i) dots.v[0][m] = fma(row[o].v[i], input.v[i], dots.v[0][m]);
      }
    }
  }
}

template <typename W, int R, int M, typename S>
inline void add_chunks(W weights, thread typename W::Chunk* chunks, device const typename W::Element* x,
                       S sources, uint pairs, uint column, uint left, bool vectorised,
                       thread Dots<R, M>& dots) {
  if constexpr (M <= 2) {
    add_chunk_few<W, R, M>(weights, chunks, x, sources, column, left, vectorised, dots);
  } else if constexpr (R == 1) {
    add_chunk_row<W, M>(weights, chunks[0], x, sources, pairs, column, left, vectorised, dots);
  } else {
    add_chunk<W, R, M>(weights, chunks, x, sources, pairs, column, left, vectorised, dots);
  }
}

// What R rows give for the pair of this lane: lane m holds those of the m-th pair, every lane those of a
// single one.
template <int R>
struct RowValues {
  float v[R];
};

// R rows of an expert's matrix times the inputs of M pairs, by one simdgroup: each byte of the rows is read
// once. One chunk of each row at a time; with two in flight together the registers let fewer simdgroups run:
// on an NVIDIA H200, dense bfloat16, one token, 15.6 instead of 14.3 us, and 10.4 instead of 8.5 us in the
// down projection.
template <typename W, int R, int M, typename S>
inline RowValues<R> expert_rows(W weights, RowSet<R> rows, device const typename W::Element* x, S sources,
                                uint pairs, uint lane, constant ExpertParams& params) {
  constexpr uint kColumns = 8 * W::kOctets;
  constexpr uint kStride = kSimdWidth * kColumns;
  const uint inputs = params.inputs;
  const bool vectorised = W::kAnyLength ? params.vectorised != 0 : true;
  typename W::Row at[R];
  UNROLL for (int r = 0; r < R; ++r) at[r] = weights.at(rows.v[r]);
  Dots<R, M> dots;
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int m = 0; m < M; ++m) dots.v[r][m] = 0.0f;
  }
  if constexpr (W::kTwoSteps) {
    // Each load has a condition of its own: in one branch for all, they were waited for where it ends.
    for (uint base = 0; base < inputs; base += kStride) {
      const uint column = base + lane * kColumns;
      typename W::Part parts[R];
      UNROLL for (int r = 0; r < R; ++r) {
        parts[r] = weights.load_part(at[r], column, column < inputs);
      }
      typename W::Chunk chunks[R];
      UNROLL for (int r = 0; r < R; ++r) chunks[r] = weights.whole(parts[r]);
      if (column < inputs) {
        add_chunks<W, R, M>(weights, chunks, x, sources, pairs, column, inputs - column, vectorised, dots);
      }
    }
  } else {
    for (uint column = lane * kColumns; column < inputs; column += kStride) {
      typename W::Chunk chunks[R];
      UNROLL for (int r = 0; r < R; ++r) chunks[r] = weights.load(at[r], column);
      add_chunks<W, R, M>(weights, chunks, x, sources, pairs, column, inputs - column, vectorised, dots);
    }
  }
  RowValues<R> values;
  UNROLL for (int r = 0; r < R; ++r) values.v[r] = 0.0f;
  UNROLL for (int m = 0; m < M; ++m) {
    if (M <= 2 || uint(m) < pairs) {
      UNROLL for (int r = 0; r < R; ++r) {
        const float sum = simd_sum(dots.v[r][m]);
        if (M == 1 || lane == uint(m)) values.v[r] = sum;
      }
    }
  }
  return values;
}

inline uint outputs_of_rows(uint rows, constant ExpertParams& params) {
  return params.row_layout == ROWS_PLAIN ? rows : rows / 2;
}

// Rows `local` .. `local` + R - 1 of the block. Past the last output they are those of the last: read, not
// stored.
template <int R>
inline RowSet<R> rows_at(uint first, uint local, constant ExpertParams& params) {
  RowSet<R> rows;
  UNROLL for (int r = 0; r < R; ++r) {
    const uint output = min(first + outputs_of_rows(local + r, params), params.outputs - 1);
    rows.v[r] = weight_row(output, (local + r) % 2, params);
  }
  return rows;
}

// Stores what R neighbouring rows of a block give for one pair.
template <typename T, int R>
inline void store_outputs(RowValues<R> values, device const uchar* bias, uint expert, uint first, uint pair,
                          device T* out, constant ExpertParams& params) {
  device T* target = out + ulong(pair) * params.outputs;
  if (params.row_layout == ROWS_PLAIN) {
    UNROLL for (int r = 0; r < R; ++r) {
      const uint output = first + r;
      if (output < params.outputs) {
        target[output] = T(plain_output(values.v[r], bias, expert, output, params));
      }
    }
  } else {
    UNROLL for (int r = 0; r < R; r += 2) {
      const uint output = first + r / 2;
      if (output < params.outputs) {
        target[output] = T(gated_output(values.v[r], values.v[r + 1], bias, expert, output, params));
      }
    }
  }
}

// The same for a single pair, each output by a lane of its own.
template <typename T, int R>
inline void store_outputs_of_pair(RowValues<R> values, device const uchar* bias, uint expert, uint first,
                                  uint pair, uint lane, device T* out, constant ExpertParams& params) {
  const bool plain = params.row_layout == ROWS_PLAIN;
  float own = 0.0f, up = 0.0f;
  UNROLL for (int r = 0; r < R; ++r) {
    if (lane == uint(plain ? r : r / 2)) {
      if (plain || r % 2 == 0) {
        own = values.v[r];
      } else {
        up = values.v[r];
      }
    }
  }
  const uint output = first + lane;
  if (lane >= outputs_of_rows(R, params) || output >= params.outputs) return;
  out[ulong(pair) * params.outputs + output] = T(finished_output(own, up, bias, expert, output, params));
}

// For a single token, or where pairs are few: each pair reads its expert's rows. Grid: (blocks of rows,
// pairs).
template <typename W, int R>
[[kernel]] void expert_rows_single(EXPERT_ROWS_BUFFERS(typename W::Element),
                                   uint2 group [[threadgroup_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  const uint pair = group.y;
  const uint count = outputs_of_rows(R, params);
  const uint first = (group.x * simdgroups + simdgroup) * count;
  if (first >= params.outputs) return;
  const uint expert = expert_of(ids, pair, params);
  if (expert == params.experts) {
    if (lane < min(count, params.outputs - first)) out[ulong(pair) * params.outputs + first + lane] = T(0.0f);
    return;
  }
  const W weights(packed, scales, biases, expert, params);
  const RowSet<R> rows = rows_at<R>(first, 0, params);
  const Sources<1> source = {{input_row(pair, params) * params.inputs}};
  const RowValues<R> values = expert_rows<W, R, 1>(weights, rows, x, source, 1, lane, params);
  store_outputs_of_pair(values, bias, expert, first, pair, lane, out, params);
}

// The pairs of one expert, ascending.
struct PairList {
  uint expert;
  uint count;
  uint before;  // pairs of experts with lower ids, if they were counted
  uint first;   // of the expert's
};

// Some of the ids, one a lane at a time: loads in flight together.
struct IdBatch {
  static constant constexpr int kIds = 4;
  static constant constexpr uint kPairs = kIds * kSimdWidth;

  uint low[kIds], high[kIds];  // words

  IdBatch(device const int* ids, uint start, uint lane, constant ExpertParams& params) {
    UNROLL for (int i = 0; i < kIds; ++i) {
      const uint word = min(start + i * kSimdWidth + lane, params.pairs - 1) << params.wide_ids;
      low[i] = uint(ids[word]);
      high[i] = 0;
      if (params.wide_ids != 0) high[i] = uint(ids[word + 1]);
    }
  }

  uint expert(int i, constant ExpertParams& params) const { return expert_of_words(low[i], high[i], params); }
};

// Each simdgroup goes through all ids by itself, so that nothing waits for the threadgroup; the first one
// writes `pairs`. `batch`: the first.
inline PairList list_pairs(device const int* ids, IdBatch batch, uint expert, bool counts_before,
                           threadgroup ushort* pairs, uint lane, uint simdgroup,
                           constant ExpertParams& params) {
  PairList list = {expert, 0, 0, 0};
  for (uint start = 0; start < params.pairs; start += IdBatch::kPairs) {
    if (start != 0) batch = IdBatch(ids, start, lane, params);
    UNROLL for (int i = 0; i < IdBatch::kIds; ++i) {
      const uint base = start + i * kSimdWidth;
      const bool is_pair = base + lane < params.pairs;
      const uint id = batch.expert(i, params);
      const uint hits = ballot(is_pair && id == expert);
      if (list.count == 0 && hits != 0) list.first = base + ctz(hits);
      if (simdgroup == 0 && (hits >> lane & 1) != 0) {
        pairs[list.count + popcount(hits & ((1u << lane) - 1))] = ushort(base + lane);
      }
      list.count += popcount(hits);
      if (counts_before) list.before += popcount(ballot(is_pair && id < expert));
    }
  }
  return list;
}

// The grid of the kernels for few tokens has a unit for each expert or each pair, whichever are fewer, and
// one more for the sentinels.
inline uint grid_units(constant ExpertParams& params) {
  return params.grid_is_experts != 0 ? params.experts : params.pairs;
}

// The pairs that a threadgroup of a unit works for, none where another one does; those of more than one stand
// in `pairs` too. Where units are pairs, the first pair of an expert works for all. `block`: of as many
// outputs as `columns`, the first that is the threadgroup's. For block 0 it also writes the list that the
// down projection works through: (pair, expert, its place among the expert's pairs, their number) ordered by
// expert, sentinels last with expert = experts. The outputs of sentinels become zero.
template <typename T>
inline PairList pairs_of_unit(device const int* ids, threadgroup ushort* pairs, device uint4* order,
                              device T* out, uint unit, uint block, uint columns, uint thread_index,
                              uint threads, uint lane, uint simdgroup, constant ExpertParams& params) {
  const PairList none = {params.experts, 0, 0, 0};
  const bool sentinels = unit == grid_units(params);
  const IdBatch batch(ids, 0, lane, params);  // before the pair's own id is waited for
  uint expert = params.experts;
  if (!sentinels) expert = params.grid_is_experts != 0 ? unit : expert_of(ids, unit, params);
  const PairList list = list_pairs(ids, batch, expert, block == 0, pairs, lane, simdgroup, params);
  const bool works_for_all = params.grid_is_experts != 0 || sentinels || list.first == unit;
  if (list.count == 0 || !works_for_all || (expert == params.experts && !sentinels)) return none;
  if (list.count > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  if (block == 0) {
    for (uint i = thread_index; i < list.count; i += threads) {
      const uint pair = list.count == 1 ? list.first : pairs[i];
      order[list.before + i] = uint4(pair, expert, i, list.count);
    }
  }
  if (!sentinels) return list;
  const uint first = block * columns;
  if (first >= params.outputs) return none;
  const uint count = min(columns, params.outputs - first);
  for (uint i = thread_index; i < list.count * count; i += threads) {
    const uint pair = list.count == 1 ? list.first : pairs[i / count];
    out[ulong(pair) * params.outputs + first + i % count] = T(0.0f);
  }
  return none;
}

constant constexpr uint kMaxPairsAtOnce = kSimdWidth;  // of one expert: more would read its rows again

// kRows neighbouring rows of an expert for up to M pairs, R of them at a time.
template <typename W, int kRows, int R, int M, typename S>
inline RowValues<kRows> row_blocks(W weights, device const typename W::Element* x, S sources, uint count,
                                   uint first, uint lane, constant ExpertParams& params) {
  RowValues<kRows> values;
  for (int block = 0; block < kRows; block += R) {
    const RowSet<R> rows = rows_at<R>(first, block, params);
    const RowValues<R> some = expert_rows<W, R, M>(weights, rows, x, sources, count, lane, params);
    UNROLL for (int r = 0; r < kRows; ++r) {
      if (r / R == block / R) values.v[r] = some.v[r % R];
    }
  }
  return values;
}

template <int M>
inline Sources<M> few_sources(threadgroup const uint* sources, uint count) {
  Sources<M> few;
  UNROLL for (int m = 0; m < M; ++m) few.v[m] = sources[min(uint(m), count - 1)];
  return few;
}

// kRows rows for the `count` <= 32 pairs of an expert whose inputs start at `sources`. With more pairs, fewer
// rows at a time: their sums are kept in registers.
template <typename W, int kRows>
inline RowValues<kRows> few_rows(W weights, device const typename W::Element* x,
                                 threadgroup const uint* sources, uint count, uint first, uint lane,
                                 constant ExpertParams& params) {
  if (count == 1) {
    return row_blocks<W, kRows, kRows, 1>(weights, x, few_sources<1>(sources, count), count, first, lane,
                                          params);
  }
  if (count == 2) {
    return row_blocks<W, kRows, 4, 2>(weights, x, few_sources<2>(sources, count), count, first, lane, params);
  }
  if (count <= 4) {
    return row_blocks<W, kRows, 4, 4>(weights, x, few_sources<4>(sources, count), count, first, lane, params);
  }
  const ManySources many = {sources};
  if (count <= 8) return row_blocks<W, kRows, 2, 8>(weights, x, many, count, first, lane, params);
  return row_blocks<W, kRows, 1, 32>(weights, x, many, count, first, lane, params);
}

// Which of the cases of few_rows a list of pairs takes.
constant constexpr uint kListLengths = 5;
inline uint list_length(uint count) {
  return count == 1 ? 0 : count == 2 ? 1 : count <= 4 ? 2 : count <= 8 ? 3 : 4;
}

// For 2 to 32 tokens: a threadgroup takes rows of one expert and every pair that chose it, so that the rows
// are read once. Grid: (blocks of rows, units and one more).
//
// The bound of 512 threads, twice what is launched, limits a thread's registers. On an NVIDIA H200, int4, 8
// tokens: 57, 62, 56 and 55 us for 512, 640, 768 and 1024, but in the down projection 79 instead of 56 for
// 768. Not measured on an Apple GPU.
template <typename W>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_rows_few(
    EXPERT_ROWS_BUFFERS(typename W::Element), device uint4* order [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  threadgroup ushort pairs[kMaxFewPairs];
  threadgroup uint sources[kFewSimdgroups * kMaxPairsAtOnce];
  constexpr uint kThreads = kFewSimdgroups * kSimdWidth;

  const uint block = outputs_of_rows(kFewSimdgroups * kFewRows, params);
  const PairList list = pairs_of_unit(ids, pairs, order, out, group.y, group.x, block, thread_index, kThreads,
                                      lane, simdgroup, params);
  if (list.count == 0) return;
  const uint expert = list.expert;
  const W weights(packed, scales, biases, expert, params);
  const uint first = group.x * block + simdgroup * outputs_of_rows(kFewRows, params);
  if (first >= params.outputs) return;
  threadgroup uint* own_sources = sources + simdgroup * kMaxPairsAtOnce;
  for (uint start = 0; start < list.count; start += kMaxPairsAtOnce) {
    const uint count = min(list.count - start, kMaxPairsAtOnce);
    const uint pair = list.count == 1 ? list.first : pairs[start + min(lane, count - 1)];
    own_sources[lane] = input_row(pair, params) * params.inputs;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const RowValues<kFewRows> values =
        few_rows<W, kFewRows>(weights, x, own_sources, count, first, lane, params);
    if (lane < count) store_outputs(values, bias, expert, first, pair, out, params);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// The sum over a token's slots, ascending; terms of a pair lie `stride` apart.
inline float sum_of_terms(threadgroup const float* terms, uint stride, uint slots) {
  float sum = 0.0f;
  for (uint slot = 0; slot < slots; ++slot) sum += terms[slot * stride];
  return sum;
}

// The R rows of one pair times its routing weight, each by a lane of its own.
template <int R>
inline void store_terms(RowValues<R> values, uint pair, uint expert, uint first, uint lane,
                        threadgroup float* terms, device const uchar* routing, device const uchar* bias,
                        constant ExpertDownParams& params) {
  float own = 0.0f;
  UNROLL for (int r = 0; r < R; ++r) own = lane == uint(r) ? values.v[r] : own;
  if (lane >= R) return;
  const uint row = min(first + lane, params.matmul.outputs - 1);
  terms[lane] = load_one(routing, params.combine.weights_dtype, pair) *
                with_bias(own, bias, expert, row, params.matmul);
}

// The down projection of one token and the sum over its experts: each simdgroup takes a slot at a time for
// the threadgroup's R rows. Grid: (blocks of R rows, tokens).
template <typename W, int R, int kMaxThreads>
[[kernel, max_total_threads_per_threadgroup(kMaxThreads)]] void expert_down_single(
    EXPERT_DOWN_BUFFERS(typename W::Element), uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  typedef typename W::Element T;
  threadgroup float terms[64 * R];  // 64 is the operators' limit of slots
  constant ExpertParams& matmul = params.matmul;
  const uint token = group.y;
  const uint first = group.x * R;
  const RowSet<R> rows = rows_at<R>(first, 0, matmul);
  for (uint slot = simdgroup; slot < matmul.slots; slot += simdgroups) {
    const uint pair = token * matmul.slots + slot;
    const uint expert = expert_of(ids, pair, matmul);
    if (expert < matmul.experts) {
      const W weights(packed, scales, biases, expert, matmul);
      const Sources<1> source = {{pair * matmul.inputs}};
      const RowValues<R> values = expert_rows<W, R, 1>(weights, rows, x, source, 1, lane, matmul);
      store_terms(values, pair, expert, first, lane, terms + slot * R, routing, bias, params);
    } else if (lane < R) {
      terms[slot * R + lane] = 0.0f;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint row = first + thread_index;
  if (thread_index < R && row < matmul.outputs) {
    const float sum = sum_of_terms(terms + thread_index, R, matmul.slots);
    out[ulong(token) * matmul.outputs + row] = T(combined(
        sum, token, row, matmul.outputs, shared_gate, shared_out, residual, dtype_of<T>(), params.combine));
  }
}

// What the pairs of a down projection for 2 to 32 tokens leave in threadgroup memory.
template <int kRows>
struct PairTerms {
  threadgroup float* values;   // the products of kRows rows of a pair's expert with its inputs
  threadgroup float* weights;  // of the pairs

  PairTerms(threadgroup float* memory, uint pairs) : values(memory), weights(memory + pairs * kRows) {}

  threadgroup float& at(uint pair, uint row) const { return values[pair * kRows + row]; }

  // Those of a sentinel are zeros.
  void start(device const int* ids, device const uchar* routing, uint thread_index, uint threads,
             constant ExpertDownParams& params) const {
    for (uint pair = thread_index; pair < params.matmul.pairs; pair += threads) {
      const bool chosen = expert_of(ids, pair, params.matmul) < params.matmul.experts;
      weights[pair] = chosen ? load_one(routing, params.combine.weights_dtype, pair) : 0.0f;
      if (!chosen) {
        UNROLL for (int r = 0; r < kRows; ++r) at(pair, r) = 0.0f;
      }
    }
  }

  // The sum over a token's slots, ascending.
  float sum(device const int* ids, device const uchar* bias, uint token, uint local, uint row,
            constant ExpertParams& params) const {
    float sum = 0.0f;
    for (uint slot = 0; slot < params.slots; ++slot) {
      const uint pair = token * params.slots + slot;
      float value = at(pair, local);
      if (params.has_bias != 0) {
        const uint expert = expert_of(ids, pair, params);
        if (expert < params.experts) value = with_bias(value, bias, expert, row, params);
      }
      sum += weights[pair] * value;
    }
    return sum;
  }
};

// The sums over each token's slots of kRows rows, from `first` on, and what is combined with them.
template <typename T, int kRows>
inline void store_combined(PairTerms<kRows> terms, uint first, device const int* ids,
                           device const uchar* bias, device const uchar* shared_gate,
                           device const uchar* shared_out, device const uchar* residual, device T* out,
                           uint thread_index, uint threads, constant ExpertDownParams& params) {
  constant ExpertParams& matmul = params.matmul;
  for (uint i = thread_index; i < matmul.tokens * kRows; i += threads) {
    const uint token = i / kRows;
    const uint row = first + i % kRows;
    if (row >= matmul.outputs) continue;
    const float sum = terms.sum(ids, bias, token, i % kRows, row, matmul);
    out[ulong(token) * matmul.outputs + row] = T(combined(
        sum, token, row, matmul.outputs, shared_gate, shared_out, residual, dtype_of<T>(), params.combine));
  }
}

// The same for 2 to 32 tokens: a threadgroup takes kFewRows rows, its simdgroups in turn the distinct
// experts of `order`, each with all its pairs. Grid: blocks of kFewRows rows. Threadgroup memory:
// kFewRows + 1 floats a pair.
template <typename W>
[[kernel, max_total_threads_per_threadgroup(512)]] void expert_down_few(
    EXPERT_DOWN_FEW_BUFFERS(typename W::Element), uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename W::Element T;
  constexpr uint kThreads = kFewSimdgroups * kSimdWidth;
  constant ExpertParams& matmul = params.matmul;
  threadgroup uint sources[kFewSimdgroups * kMaxPairsAtOnce];
  threadgroup uint* own_sources = sources + simdgroup * kMaxPairsAtOnce;
  const uint first = group * kFewRows;
  const PairTerms<kFewRows> terms(memory, matmul.pairs);
  terms.start(ids, routing, thread_index, kThreads, params);
  // Experts with equally many pairs together, so that the simdgroups run the same code at a time: in the
  // order of ids the kernel waited for instructions for half of its time (32 tokens).
  uint turn = 0;
  for (uint length = 0; length < kListLengths; ++length) {
    for (uint base = 0; base < matmul.pairs; base += kSimdWidth) {
      const uint entry = base + lane;
      bool starts = false;
      if (entry < matmul.pairs) {
        const uint4 own = order[entry];
        starts = own.y < matmul.experts && own.z == 0 && list_length(own.w) == length;
      }
      for (uint left = ballot(starts); left != 0; left &= left - 1, ++turn) {
        if (turn % kFewSimdgroups != simdgroup) continue;
        const uint start = base + ctz(left);
        const uint expert = order[start].y;
        const uint end = start + order[start].w;
        const W weights(packed, scales, biases, expert, matmul);
        for (uint some = start; some < end; some += kMaxPairsAtOnce) {
          const uint count = min(end - some, kMaxPairsAtOnce);
          const uint pair = order[some + min(lane, count - 1)].x;
          own_sources[lane] = pair * matmul.inputs;
          simdgroup_barrier(mem_flags::mem_threadgroup);
          const RowValues<kFewRows> values =
              few_rows<W, kFewRows>(weights, x, own_sources, count, first, lane, matmul);
          if (lane < count) {
            UNROLL for (int r = 0; r < kFewRows; ++r) terms.at(pair, r) = values.v[r];
          }
          simdgroup_barrier(mem_flags::mem_threadgroup);
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_combined<T, kFewRows>(terms, first, ids, bias, shared_gate, shared_out, residual, out, thread_index,
                              kThreads, params);
}
