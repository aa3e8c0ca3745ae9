// The rows of an expert with a single pair, for several tokens: dot products, as for one token.
#pragma once
#include "expert_decode.h"

constant constexpr uint kHalfSimd = kSimdWidth / 2, kQuarterSimd = kSimdWidth / 4;

// The sums of four values over a simdgroup: of even.x, odd.x, even.y and odd.y in a quarter of its lanes
// each.
inline float four_sums(vec<float, 2> even, vec<float, 2> odd, uint lane) {
  const bool is_y = (lane & kHalfSimd) != 0, is_odd = (lane & kQuarterSimd) != 0;
  const float first = (is_y ? even.y : even.x) + simd_shuffle_xor(is_y ? even.x : even.y, ushort(kHalfSimd));
  const float second = (is_y ? odd.y : odd.x) + simd_shuffle_xor(is_y ? odd.x : odd.y, ushort(kHalfSimd));
  float sum = (is_odd ? second : first) + simd_shuffle_xor(is_odd ? first : second, ushort(kQuarterSimd));
  UNROLL for (uint bit = kQuarterSimd / 2; bit > 0; bit /= 2) sum += simd_shuffle_xor(sum, ushort(bit));
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
  static constant constexpr uint kThreads = kMatrixSimdgroups * kSimdWidth;
  static constant constexpr int kItems = W::kOctets / int(kMatrixSimdgroups);
  static_assert(W::kOctets % kMatrixSimdgroups == 0, "as many octets for each thread");

  threadgroup vec<float, 4>* fours;      // [fours of a lane][lanes]
  threadgroup vec<float, 2>* part_sums;  // [simdgroups][lanes], of what each simdgroup staged

  struct Loaded {
    Octet<T> v[kItems];
  };

  // A thread's part of those from `base` on. Beyond the end, where scales and biases are zero, the last ones
  // again.
  Loaded load(device const T* x, uint base, uint inputs, uint thread_index) const {
    Loaded loaded;
    UNROLL for (int n = 0; n < kItems; ++n) {
      const uint i = thread_index + n * kThreads;
      const uint column = base + i % kSimdWidth * kLaneColumns + 8 * (i / kSimdWidth);
      loaded.v[n] = load_octet(x + min(column, inputs - 8), 8, true);
    }
    return loaded;
  }

  void stage(Loaded loaded, uint thread_index) const {
    InputSums own = {{0.0f, 0.0f}};
    UNROLL for (int n = 0; n < kItems; ++n) {
      const uint i = thread_index + n * kThreads, lane = i % kSimdWidth, octet = i / kSimdWidth;
      const Pack<8> values = loaded.v[n].values();
      W::coded(values, own);
      UNROLL for (int half_octet = 0; half_octet < 2; ++half_octet) {
        threadgroup vec<float, 4>& four = fours[(2 * octet + half_octet) * kSimdWidth + lane];
        UNROLL for (int k = 0; k < 4; ++k) four[k] = values.v[4 * half_octet + k];
      }
    }
    part_sums[thread_index] = vec<float, 2>(own.v[0], own.v[1]);
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
    UNROLL for (uint s = 0; s < kMatrixSimdgroups; ++s) {
      const vec<float, 2> part = part_sums[s * kSimdWidth + lane];
      sums.v[0] += part.x;
      sums.v[1] += part.y;
    }
    return sums;
  }
};

// A lane's columns of a couple of rows.
template <typename W>
struct LaneRows {
  typename W::Part parts[2];
};

// Where they are, couple by couple.
template <typename W>
struct RowCursors {
  W weights;
  RowCouples couples;
  uint lane;
  bool active;
  typename W::Cursor cursors[2];

  RowCursors(W weights_, RowCouples couples_, uint column, uint lane_, bool active_)
      : weights(weights_), couples(couples_), lane(lane_), active(active_) {
    UNROLL for (int r = 0; r < 2; ++r) cursors[r] = weights.cursor(couples.rows[r], column);
  }

  // Of couple i, the next.
  void load(thread LaneRows<W>& rows, uint i) {
    UNROLL for (int r = 0; r < 2; ++r) {
      weights.load(rows.parts[r], cursors[r], lane, active && i < couples.counts[r]);
      cursors[r] = weights.advanced(cursors[r], couples.stride);
    }
  }
};

// A lane's part of the dot products of couple i with a block of inputs; the next one is loaded meanwhile.
template <typename W>
inline vec<float, 2> dots_of_couple(W weights, LoneInputs<W> inputs, InputSums sums,
                                    thread RowCursors<W>& cursors, LaneRows<W> now, uint i,
                                    thread LaneRows<W>& next, uint lane) {
  // What follows stays behind the couple before: without it the compiler (NVRTC) moves the first use of these
  // rows, and so the wait for them, to where they are loaded.
  simdgroup_barrier(mem_flags::mem_none);
  typename W::Chunk rows[2];
  UNROLL for (int r = 0; r < 2; ++r) rows[r] = weights.shared(now.parts[r], lane);
  cursors.load(next, i + 1);
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
  return vec<float, 2>(weights.scaled(rows[0], dots[0], sums), weights.scaled(rows[1], dots[1], sums));
}

// The dot products of up to 16 couples of rows with a block of inputs. A lane has that of a gate, or an even
// row, in the lower half of the simdgroup, of couple_of_lane. Two couples take turns in the registers: where
// one was copied for the next, the loop had 7 % more instructions.
template <typename W>
inline float dots_of_pair(W weights, LoneInputs<W> inputs, RowCouples couples, thread RowCursors<W>& cursors,
                          LaneRows<W> first, uint lane) {
  const InputSums sums = inputs.sums(lane);
  float found = 0.0f;
  LaneRows<W> second = {};
  for (uint i = 0; i < couples.counts[0]; i += 2) {
    const vec<float, 2> even = dots_of_couple(weights, inputs, sums, cursors, first, i, second, lane);
    const vec<float, 2> odd = dots_of_couple(weights, inputs, sums, cursors, second, i + 1, first, lane);
    const float sum = four_sums(even, odd, lane);
    if (lane % kQuarterSimd == i / 2) found += sum;
  }
  return found;
}

inline uint couple_of_lane(uint lane) {
  return 2 * (lane % kQuarterSimd) + lane / kQuarterSimd % 2;
}

// Its outputs, those of a simdgroup: `count` <= 32, or 16 where there are gates, from `first` on.
template <typename W>
inline void rows_of_pair(W weights, device const typename W::Element* x, LoneInputs<W> inputs, PairList list,
                         uint first, uint count, uint thread_index, uint lane, device const uchar* bias,
                         device typename W::Element* out, constant ExpertParams& params) {
  const bool plain = params.row_layout == ROWS_PLAIN;
  const uint outputs = first < params.outputs ? min(count, params.outputs - first) : 0;
  const RowCouples couples(first, outputs, params);
  float own = 0.0f;
  for (uint base = 0; base < params.inputs; base += LoneInputs<W>::kColumns) {
    const uint column = base + lane * LoneInputs<W>::kLaneColumns;
    // The inputs first: they come from nearer than the rows.
    const typename LoneInputs<W>::Loaded loaded =
        inputs.load(x + input_row(list.first, params) * params.inputs, base, params.inputs, thread_index);
    RowCursors<W> cursors(weights, couples, column, lane, column < params.inputs);
    LaneRows<W> ahead = {};
    cursors.load(ahead, 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    inputs.stage(loaded, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    own += dots_of_pair(weights, inputs, couples, cursors, ahead, lane);
  }
  const float up = simd_shuffle(own, ushort(lane | kHalfSimd));
  if (!plain && lane >= kHalfSimd) return;
  const uint couple = couple_of_lane(lane), output = plain ? 2 * couple + lane / kHalfSimd : couple;
  if (output >= outputs) return;
  out[ulong(list.first) * params.outputs + first + output] =
      typename W::Element(finished_output(own, up, bias, list.expert, first + output, params));
}
