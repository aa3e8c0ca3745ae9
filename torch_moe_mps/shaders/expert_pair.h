// The rows of an expert with a single pair, for several tokens: dot products, as for one token.
#pragma once
#include "expert_decode.h"

// The sums of two values over a simdgroup: that of the first in its lower half, of the second in its upper.
inline float two_sums(float first, float second, uint lane) {
  constexpr uint kHalf = kSimdWidth / 2;
  const bool upper = lane >= kHalf;
  float sum = (upper ? second : first) + simd_shuffle_xor(upper ? first : second, ushort(kHalf));
  UNROLL for (uint other = kHalf / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, ushort(other));
  return sum;
}

// Rows of an expert two by two, from output `first` on: a gate and its up, or neighbours.
struct RowCouples {
  uint rows[2];
  uint stride;     // to those of the next two
  uint counts[2];  // of either

  RowCouples(uint first, uint outputs, constant ExpertParams& params) {
    const bool plain = params.row_layout == ROWS_PLAIN;
    rows[0] = weight_row(first, 0, params);
    rows[1] = plain ? first + 1 : weight_row(first, 1, params);
    stride = params.row_layout == ROWS_HALVES ? 1 : 2;
    counts[0] = plain ? (outputs + 1) / 2 : outputs;
    counts[1] = plain ? outputs / 2 : outputs;
  }
};

// A block of the inputs of an expert's only pair as floats in threadgroup memory, for a lane eight times
// kOctets columns.
template <typename W>
struct LoneInputs {
  typedef typename W::Element T;
  static constant constexpr uint kLaneColumns = 8 * W::kOctets;
  static constant constexpr uint kColumns = kSimdWidth * kLaneColumns;

  threadgroup vec<float, 4>* fours;  // [fours of a lane][lanes]

  // Those from `base` on; zeros beyond the end.
  void stage(device const T* x, uint base, uint inputs, uint thread_index) const {
    for (uint i = thread_index; i < W::kOctets * kSimdWidth; i += kMatrixSimdgroups * kSimdWidth) {
      const uint lane = i % kSimdWidth, octet = i / kSimdWidth;
      const uint column = base + lane * kLaneColumns + 8 * octet;
      Pack<8> values = {};
      if (column < inputs) values = load_octet(x + column, 8, true).values();
      UNROLL for (int half_octet = 0; half_octet < 2; ++half_octet) {
        threadgroup vec<float, 4>& four = fours[(2 * octet + half_octet) * kSimdWidth + lane];
        UNROLL for (int k = 0; k < 4; ++k) four[k] = values.v[4 * half_octet + k];
      }
    }
  }

  Pack<8> octet(int number, uint lane) const {
    Pack<8> values;
    UNROLL for (int half_octet = 0; half_octet < 2; ++half_octet) {
      const vec<float, 4> four = fours[(2 * number + half_octet) * kSimdWidth + lane];
      UNROLL for (int k = 0; k < 4; ++k) values.v[4 * half_octet + k] = four[k];
    }
    return values;
  }

  InputSums sums(uint lane) const {
    InputSums sums = {{0.0f, 0.0f}};
    UNROLL for (int o = 0; o < W::kOctets; ++o) W::coded(octet(o, lane), sums);
    return sums;
  }
};

// A lane's columns of the next two rows, loaded ahead; zeros where the lane is not active.
template <typename W>
struct RowsAhead {
  typename W::Cursor cursors[2];
  typename W::Part parts[2];

  RowsAhead(W weights, RowCouples couples, uint column, uint lane, bool active) {
    const typename W::Part none = {};
    UNROLL for (int r = 0; r < 2; ++r) {
      cursors[r] = weights.cursor(couples.rows[r], column);
      parts[r] = weights.load(none, cursors[r], lane, active && couples.counts[r] != 0);
    }
  }

  // The i-th two.
  void load(W weights, RowCouples couples, uint i, uint lane, bool active) {
    UNROLL for (int r = 0; r < 2; ++r) {
      cursors[r] = weights.advanced(cursors[r], couples.stride);
      parts[r] = weights.load(parts[r], cursors[r], lane, active && i < couples.counts[r]);
    }
  }
};

// The dot products of rows with a block of inputs. Those of the i-th two are of lane i and of lane 16 + i.
template <typename W>
inline float dots_of_pair(W weights, LoneInputs<W> inputs, RowCouples couples, RowsAhead<W> ahead,
                          bool active, uint lane) {
  const InputSums sums = inputs.sums(lane);
  float found = 0.0f;
  for (uint i = 0; i < couples.counts[0]; ++i) {
    typename W::Chunk rows[2];
    UNROLL for (int r = 0; r < 2; ++r) rows[r] = weights.shared(ahead.parts[r], lane);
    ahead.load(weights, couples, i + 1, lane, active);
    // Keeps the loads here and the inputs where they are: without it the compiler (NVRTC) loads rows just
    // before they are used, and takes the inputs into registers, too many.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float dots[2] = {0.0f, 0.0f};
    UNROLL for (int o = 0; o < W::kOctets; ++o) {
      const Pack<8> values = inputs.octet(o, lane);
      UNROLL for (int r = 0; r < 2; ++r) {
        const Pack<8> codes = weights.codes(rows[r], o);
        UNROLL for (int k = 0; k < 8; ++k) dots[r] = fma(codes.v[k], values.v[k], dots[r]);
      }
    }
    const float sum =
        two_sums(weights.scaled(rows[0], dots[0], sums), weights.scaled(rows[1], dots[1], sums), lane);
    if (lane % (kSimdWidth / 2) == i) found += sum;
  }
  return found;
}

// Its outputs, those of a simdgroup from `first` on.
template <typename W>
inline void rows_of_pair(W weights, device const typename W::Element* x, LoneInputs<W> inputs, PairList list,
                         uint first, uint thread_index, uint lane, device const uchar* bias,
                         device typename W::Element* out, constant ExpertParams& params) {
  constexpr uint kHalf = kSimdWidth / 2;
  const bool plain = params.row_layout == ROWS_PLAIN;
  const uint outputs =
      first < params.outputs ? min(outputs_of_rows(kMatrixRows, params), params.outputs - first) : 0;
  const RowCouples couples(first, outputs, params);
  float own = 0.0f;
  for (uint base = 0; base < params.inputs; base += LoneInputs<W>::kColumns) {
    const uint column = base + lane * LoneInputs<W>::kLaneColumns;
    const bool active = column < params.inputs;
    const RowsAhead<W> ahead(weights, couples, column, lane, active);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    inputs.stage(x + input_row(list.first, params) * params.inputs, base, params.inputs, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    own += dots_of_pair(weights, inputs, couples, ahead, active, lane);
  }
  const float up = simd_shuffle(own, ushort(lane | kHalf));
  const uint output = plain ? 2 * (lane % kHalf) + lane / kHalf : lane;
  if (output >= outputs) return;
  out[ulong(list.first) * params.outputs + first + output] =
      typename W::Element(finished_output(own, up, bias, list.expert, first + output, params));
}
