// A token of each row of logits, drawn by weight from those that top-k, top-p and min-p keep.
#pragma once
#include "common/counting.h"
#include "common/simdgroups.h"
#include "common/vectors.h"
#include "geometry/sampling.h"
#include "params/sampling.h"

// The bits of a token's weight, its number, and its score in order. Top-k keeps the highest scores, top-p the
// highest weights, and of equal ones the highest numbers.
typedef uint3 TokenKey;

// Ten bits of a key, which are the number of a bin. Weights are at most 1, so 30 bits have all of one.
struct Digit {
  uint word;
  uint shift;
  uint mask;

  uint of(TokenKey key) const { return (word == 0 ? key.x : word == 1 ? key.y : key.z) >> shift & mask; }
  TokenKey place(uint digit) const {
    const uint bits = digit << shift;
    return TokenKey(word == 0 ? bits : 0, word == 1 ? bits : 0, word == 2 ? bits : 0);
  }
};
constant constexpr uint kWeightDigits = 3;
constant constexpr uint kScoreDigits = 5;  // the first of them, behind two of the number
constant constexpr uint kAllDigits = 9;

inline Digit digit_of(uint number) {
  if (number < kWeightDigits) return {0, 20 - 10 * number, 0x3ff};
  if (number < kScoreDigits) return {1, 40 - 10 * number, 0x3ff};
  return {2, number < kAllDigits - 1 ? 72 - 10 * number : 0, number < kAllDigits - 1 ? 0x3ffu : 0x3u};
}

// A row, and what of it is kept.
template <typename T>
struct ScoreRow {
  device const T* logits;
  threadgroup const float* maxima;  // of chunks
  float temperature;
  float highest;
  uint vocabulary;
  uint lowest_score;    // that top-k keeps, in order
  TokenKey lowest;      // that top-p keeps; the bits that are not known yet are 0
  float lowest_weight;  // that min-p keeps

  uint chunks() const { return (vocabulary + kSampleChunk - 1) / kSampleChunk; }
  TokenKey key(float score, uint token) const {
    return TokenKey(as_type<uint>(precise::exp(score - highest)), token,
                    in_order(score == 0.0f ? 0.0f : score));
  }
  TokenKey key_of(uint token) const { return key(widen(logits[token]) / temperature, token); }
  bool keeps(TokenKey key) const {
    const bool is_heavy = key.x > lowest.x || (key.x == lowest.x && key.y >= lowest.y);
    return key.z >= lowest_score && is_heavy && as_type<float>(key.x) >= lowest_weight;
  }
};

// Shows `visitor` the tokens that are kept: a simdgroup takes a chunk whose highest score is.
template <typename T, class Visitor>
inline void visit(ScoreRow<T> row, thread Visitor& visitor, uint lane, uint simdgroup) {
  for (uint first = simdgroup * kSimdWidth; first < row.chunks(); first += kSampleThreads) {
    const bool is_chunk = first + lane < row.chunks();
    const float highest = is_chunk ? row.maxima[first + lane] : -INFINITY;
    uint kept = ballot(is_chunk && row.keeps(row.key(highest, ~0u)));
    while (kept != 0) {
      const uint start = (first + ctz(kept)) * kSampleChunk + lane;
      kept &= kept - 1;
      UNROLL for (uint i = 0; i < kSampleChunk; i += kSimdWidth) {
        if (start + i < row.vocabulary) {
          const TokenKey key = row.key_of(start + i);
          if (row.keeps(key)) visitor.see(key);
        }
      }
    }
  }
}

// Counts tokens by a digit, and sums their weights: those of a bin have one exponent, so that sums of the
// upper and lower halves of their significands are exact, in any order.
template <bool kWeighs>
struct Counter {
  threadgroup uint* bins;
  TokenKey known;
  TokenKey bits;
  Digit digit;

  void add(uint place, uint value) {
    atomic_fetch_add_explicit(reinterpret_cast<threadgroup atomic_uint*>(bins + place), value,
                              memory_order_relaxed);
  }
  void see(TokenKey key) {
    if (!all((key & known) == bits)) return;
    const uint bin = digit.of(key);
    add(bin, 1);
    if (kWeighs) {
      const uint significand = (key.x & 0x7fffff) | 0x800000;
      add(kSampleBins + bin, significand & 0xfff);
      add(2 * kSampleBins + bin, significand >> 12);
    }
  }
};

struct SampleMemory {
  threadgroup uint* bins;     // [3, kSampleBins]
  threadgroup uint* numbers;  // [kMaxSimdgroups]
  threadgroup float* values;  // [kMaxSimdgroups]
  threadgroup uint* found;    // [3]
};

// The key of the last token that is kept, digit after digit from the highest: of so many tokens, or of so
// much weight, where all are kWholeWeight. Zeros stand for digits that make no difference.
template <bool kMaxima, bool kWeighs, typename T>
inline TokenKey last_kept(ScoreRow<T> row, uint wanted, SampleMemory memory, uint thread_index, uint lane,
                          uint simdgroup) {
  constexpr uint kFirst = kWeighs ? 0 : kScoreDigits;
  constexpr uint kEnd = kWeighs ? kScoreDigits : kMaxima ? kScoreDigits + 2 : kAllDigits;
  Counter<kWeighs> counter = {memory.bins, TokenKey(0), TokenKey(0), digit_of(kFirst)};
  float scale = 0.0f;
  for (uint round = kFirst; round < kEnd; ++round) {
    counter.digit = digit_of(round);
    for (uint i = 0; i < (kWeighs ? 3 : 1); ++i) memory.bins[i * kSampleBins + thread_index] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kMaxima) {
      for (uint i = thread_index; i < row.chunks(); i += kSampleThreads) {
        counter.see(row.key(row.maxima[i], 0));
      }
    } else {
      if (kWeighs) row.lowest = counter.bits;
      visit(row, counter, lane, simdgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // The first thread takes the highest bin.
    const uint bin = kSampleBins - 1 - thread_index, count = memory.bins[bin];
    uint own = count;
    if (kWeighs) {
      const uint weight_bits = counter.bits.x | counter.digit.place(bin).x;
      const float unit = as_type<float>(weight_bits & 0x7f800000) * (1.0f / 8388608.0f);
      const float significands =
          float(memory.bins[kSampleBins + bin]) + 4096.0f * float(memory.bins[2 * kSampleBins + bin]);
      const float weight = significands * unit;
      if (round == kFirst) {
        const float sum = simd_sum(weight);
        if (lane == 0) memory.values[simdgroup] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scale = float(kWholeWeight) / simd_sum(memory.values[lane]);
      }
      own = count == 0 ? 0 : max(1u, uint(weight * scale + 0.5f));
    }
    const Sums sums = sums_of_threads(own, memory.numbers, lane, simdgroup);
    wanted = min(wanted, sums.all);
    if (sums.before < wanted && wanted <= sums.before + own) {
      memory.found[0] = bin;
      memory.found[1] = sums.before;
      memory.found[2] = count == 1 || wanted == sums.before + own ? 1 : 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    counter.bits |= counter.digit.place(memory.found[0]);
    counter.known |= counter.digit.place(counter.digit.mask);
    wanted -= memory.found[1];
    if (memory.found[2] != 0) break;  // the whole bin is kept
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return counter.bits;
}

// Torch's exponential numbers on mps have a -0 in about 3e7.
constant constexpr float kLeastDraw = FLT_MIN;

// The token whose weight divided by its draw is the largest: one of them with the probability of its weight,
// where draws are of the exponential distribution. The first of equal ones.
struct Race {
  device const float* draws;
  bool has_draws;  // else the first token wins
  float best;
  uint token;

  void see(TokenKey key) {
    float value = 0.0f;
    if (has_draws) {
      const float draw = draws[key.y];
      value = as_type<float>(key.x) / (draw < kLeastDraw ? kLeastDraw : draw);  // NaN stays, and wins nothing
    }
    if (value > best) {
      best = value;
      token = key.y;
    }
  }
  void join_lanes() {
    const float most = simd_max(best);
    token = simd_min(best == most ? token : ~0u);
    best = most;
  }
};

// The first token whose score is +inf, in a row with such scores or NaN; ~0 with NaN.
template <typename T>
inline uint first_infinite(ScoreRow<T> row, threadgroup uint* numbers, uint thread_index, uint lane,
                           uint simdgroup) {
  uint first = ~0u;  // from 1 on; 0 is NaN
  for (uint token = thread_index; token < row.vocabulary; token += kSampleThreads) {
    const float logit = widen(row.logits[token]);
    if (isnan(logit)) first = 0;
    if (logit == INFINITY) first = min(first, token + 1);
  }
  first = simd_min(first);
  if (lane == 0) numbers[simdgroup] = first;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_min(numbers[lane]) - 1;
}

// A threadgroup takes a row, and reads it once for the highest scores of chunks: after that, only chunks that
// have tokens that may be kept. Loads of several chunks are in flight: the row's time is that of their
// latency.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSampleThreads)]] void sample_rows(
    device const T* logits [[buffer(0)]], device const float* draws [[buffer(1)]],
    device const long* invalid [[buffer(2)]], device long* sampled [[buffer(3)]],
    constant SampleParams& params [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], LANES) {
  constexpr uint kAtOnce = 4;
  threadgroup float maxima[kSampleChunks];
  threadgroup uint bins[3 * kSampleBins];
  threadgroup uint numbers[kMaxSimdgroups];
  threadgroup float values[kMaxSimdgroups];
  threadgroup uint found[3];
  ScoreRow<T> row = {logits + group * params.row_stride,
                     maxima,
                     params.temperature,
                     -INFINITY,
                     params.vocabulary,
                     0,
                     TokenKey(0),
                     0.0f};
  for (uint first = simdgroup * kAtOnce; first < row.chunks(); first += kMaxSimdgroups * kAtOnce) {
    float of_chunk[kAtOnce];
    UNROLL for (uint c = 0; c < kAtOnce; ++c) {
      of_chunk[c] = -INFINITY;
      UNROLL for (uint i = 0; i < kSampleChunk; i += kSimdWidth) {
        const uint token = (first + c) * kSampleChunk + i + lane;
        const float logit = token < row.vocabulary ? widen(row.logits[token]) : -INFINITY;
        of_chunk[c] = max(of_chunk[c], isnan(logit) ? INFINITY : logit);
      }
    }
    UNROLL for (uint c = 0; c < kAtOnce; ++c) {
      const float highest = simd_max(of_chunk[c]) / row.temperature;
      if (lane == 0 && first + c < row.chunks()) maxima[first + c] = highest;
      row.highest = max(row.highest, highest);
    }
  }
  if (lane == 0) values[simdgroup] = row.highest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  row.highest = simd_max(values[lane]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool was_invalid = params.has_invalid != 0 && invalid[group] != 0;
  if (!isfinite(row.highest)) {
    const bool may_win = params.has_draws == 0 && row.highest > 0.0f;
    const uint token = may_win ? first_infinite(row, numbers, thread_index, lane, simdgroup) : ~0u;
    if (thread_index == 0) {
      sampled[group] = token == ~0u ? params.otherwise : token;
      sampled[params.rows + group] = token == ~0u || was_invalid;
    }
    return;
  }
  const SampleMemory memory = {bins, numbers, values, found};
  if (params.has_draws == 0) {
    row.lowest_score = row.key(row.highest, 0).z;
  } else if (params.top_k != 0) {
    // The top_k best tokens are not below the top_k best chunks.
    if (params.top_k <= row.chunks()) {
      row.lowest_score = last_kept<true, false>(row, params.top_k, memory, thread_index, lane, simdgroup).z;
    }
    const TokenKey last = last_kept<false, false>(row, params.top_k, memory, thread_index, lane, simdgroup);
    row.lowest_score = max(row.lowest_score, last.z);
  }
  if (params.has_draws != 0 && params.weight < kWholeWeight) {
    row.lowest = last_kept<false, true>(row, params.weight, memory, thread_index, lane, simdgroup);
  }
  row.lowest_weight = params.min_p;
  Race race = {draws + ulong(group) * params.vocabulary, params.has_draws != 0, -1.0f, ~0u};
  visit(row, race, lane, simdgroup);
  race.join_lanes();
  if (lane == 0) {
    values[simdgroup] = race.best;
    numbers[simdgroup] = race.token;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  race.best = values[lane];
  race.token = numbers[lane];
  race.join_lanes();
  if (thread_index == 0) {
    const bool is_drawn = race.token != ~0u;
    sampled[group] = is_drawn ? race.token : params.otherwise;
    sampled[params.rows + group] = !is_drawn || was_invalid;
  }
}
