// Attention of a block of queries of one key head over its keys.
//
// A threadgroup takes 8 * kQueryTiles queries, of several heads and tokens, and a range of the keys, in tiles
// of kKeyTiles * 8 keys a simdgroup. Scores are keys x queries: a simdgroup multiplies its own keys with all
// queries. Their exponentials go to all simdgroups through threadgroup memory, and each simdgroup sums all
// values of the tile for its own part of the value head. So a key and a value are read once for all queries
// of the block, straight into matrix fragments (see MatrixPlace), and the registers that a thread needs do
// not grow with the width of the heads.
#pragma once
#include <metal_simdgroup_matrix>

#include "common.h"

// Loops that would take too many registers with several rounds in flight.
#define ROLLED _Pragma("clang loop unroll(disable)")

constant constexpr float kLowest = -3.402823466e38f;
constant constexpr int kNoQuery = -(1 << 30);  // in place of a position
constant constexpr int kKeyTiles = 2;          // of 8 keys, of a simdgroup: half as many barriers as with one

// A lane's place in a matrix of 8x8: it holds two neighbouring elements of a row. Metal leaves the layout
// open; it is the same on all Apple GPUs up to now.
struct LanePlace {
  uint row;
  uint quarter;  // the lane's elements are in columns 2 * quarter and 2 * quarter + 1

  LanePlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};

// Reductions over the lanes that hold the same column, and over those that hold the same row.
inline float max_of_column(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(2)));
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}
inline float sum_of_column(float x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

// Two neighbouring elements as they lie in memory.
inline float2 pair_of(half, uint word) {
  return float2(as_type<half2>(word));
}
inline float2 pair_of(bfloat, uint word) {
  return float2(as_type<float>(word << 16), as_type<float>(word & 0xffff0000u));
}

// The keys or the values of a head in T. A tile's keys are counted from its first, so that 32 bits are
// enough.
template <typename T>
struct DenseCache {
  typedef T Element;
  static constant constexpr int kPerWord = 4 / sizeof(T);

  template <int N>
  struct Run {
    Words<N / kPerWord> words;
  };

  device const T* start;
  uint stride, width;
  bool vectorised;

  DenseCache(device const uchar* values, device const T*, device const T*, uint batch, uint head,
             constant CacheParams& params)
      : start(reinterpret_cast<device const T*>(values) + batch * params.batch_stride +
              head * params.head_stride),
        stride(params.key_stride),
        width(params.width),
        vectorised(params.vectorised != 0) {}

  // Zeros past the end of the head, and for a key that is not wanted.
  template <int N>
  Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    Run<N> run = {};
    if (!wanted || column >= width) return run;
    device const T* source = start + ulong(tile) * stride + (key * stride + column);
    if (vectorised) {
      run.words = load_words<N / kPerWord>(reinterpret_cast<device const uint*>(source));
      return run;
    }
    UNROLL for (int i = 0; i < N; ++i) {
      if (column + i >= width) break;
      if constexpr (kPerWord == 1) {
        run.words.v[i] = as_type<uint>(source[i]);
      } else {
        run.words.v[i / 2] |= uint(as_type<ushort>(source[i])) << (16 * (i % 2));
      }
    }
    return run;
  }

  // Which value of a run a pair's element is.
  static int value_of(int pair, int element) { return 2 * pair + element; }
  template <int N>
  static float2 pair(Run<N> run, int index) {
    if constexpr (kPerWord == 1) {
      return float2(as_type<float>(run.words.v[2 * index]), as_type<float>(run.words.v[2 * index + 1]));
    } else {
      return pair_of(T(0.0f), run.words.v[index]);
    }
  }
};

// The same in codes of 8 bits, with a scale and a bias in T for each group.
template <typename T>
struct QuantizedCache {
  typedef T Element;

  template <int N>
  struct Run {
    Words<N == 2 ? 1 : N / 4> words;
    T scale, bias;
  };

  device const uchar* start;
  device const T* scales;
  device const T* biases;
  uint stride, scales_stride, width, group_shift;

  QuantizedCache(device const uchar* values, device const T* scales_, device const T* biases_, uint batch,
                 uint head, constant CacheParams& params)
      : start(values + 4 * (batch * params.batch_stride + head * params.head_stride)),
        stride(4 * params.key_stride),
        scales_stride(params.scales_key_stride),
        width(params.width),
        group_shift(params.group_shift) {
    const ulong first = batch * params.scales_batch_stride + head * params.scales_head_stride;
    scales = scales_ + first;
    biases = biases_ + first;
  }

  template <int N>
  Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    Run<N> run = {};
    if (!wanted || column >= width) return run;
    device const uchar* source = start + ulong(tile) * stride + (key * stride + column);
    if constexpr (N == 2) {
      const uint two = *reinterpret_cast<device const ushort*>(source);
      run.words.v[0] = (two | two << 8) & 0x00ff00ffu;
    } else {
      run.words = load_words<N / 4>(reinterpret_cast<device const uint*>(source));
    }
    const uint group = key * scales_stride + (column >> group_shift);
    run.scale = (scales + ulong(tile) * scales_stride)[group];
    run.bias = (biases + ulong(tile) * scales_stride)[group];
    return run;
  }

  // Two codes 16 bits apart become the mantissas of two halves: that takes no conversion from integers.
  static int value_of(int pair, int element) { return 4 * (pair / 2) + pair % 2 + 2 * element; }
  template <int N>
  static float2 pair(Run<N> run, int index) {
    const uint codes = (run.words.v[index / 2] >> (8 * (index % 2))) & 0x00ff00ffu;
    const half2 numbers = as_type<half2>(codes | 0x64006400u) - half2(1024.0h);
    const float scale = float(run.scale), bias = float(run.bias);
    return float2(fma(float(numbers.x), scale, bias), fma(float(numbers.y), scale, bias));
  }
};

template <int N>
struct RunValues {
  float v[N];
};

template <typename C, int N>
inline RunValues<N> values_of(typename C::template Run<N> run) {
  RunValues<N> pack;
  UNROLL for (int i = 0; i < N / 2; ++i) {
    const float2 two = C::template pair<N>(run, i);
    if constexpr (N == 2) {
      pack.v[0] = two.x;
      pack.v[1] = two.y;
    } else {
      pack.v[C::value_of(i, 0)] = two.x;
      pack.v[C::value_of(i, 1)] = two.y;
    }
  }
  return pack;
}

inline float lowest_of(uint dtype) {
  return dtype == DTYPE_FLOAT ? kLowest : dtype == DTYPE_HALF ? -65504.0f : -3.3895313892515355e38f;
}

// What the mask adds to the score of a key: -INFINITY for a key that the token does not see. `position` is
// the token's own key, or kNoQuery.
inline float bias_of(device const uchar* mask, ulong start, int position, uint key,
                     constant AttentionParams& params) {
  const int distance = position - int(key);
  if (params.mask_kind == MASK_NONE) {
    const bool seen = distance >= 0 && (params.window == 0 || distance < int(params.window));
    return seen ? 0.0f : -INFINITY;
  }
  if (position == kNoQuery) return -INFINITY;
  const ulong token = ulong(position + int(params.tokens) - int(params.keys));
  const ulong index = start + token * params.mask_token_stride + ulong(key) * params.mask_key_stride;
  if (params.mask_kind == MASK_BOOL) return mask[index] != 0 ? 0.0f : -INFINITY;
  const float bias = load_one(mask, params.mask_dtype, index);
  return bias <= lowest_of(params.mask_dtype) ? -INFINITY : bias;
}

// The results of a query over all its keys, and the sink of its head.
struct Total {
  float highest;
  float sum;
};

// What the values are multiplied by in the end; 0 if the query saw no key.
inline float final_factor(Total total, device const uchar* sinks, uint head,
                          constant AttentionParams& params) {
  if (params.has_sinks == 0) return total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
  const float sink = load_one(sinks, params.sinks_dtype, head);
  const float highest = max(total.highest, sink);
  const float factor = precise::exp(total.highest - highest);
  const float sum = total.sum * factor + precise::exp(sink - highest);
  return sum == 0.0f ? 0.0f : factor / sum;
}

// Where the chunks leave their results for attention_merge: the values of all, then (highest, sum) of each.
inline device float* partial_values(device float* partials, uint chunk, uint row,
                                    constant AttentionParams& params) {
  return partials + (ulong(chunk) * params.rows + row) * params.v.width;
}

inline device float* partial_total(device float* partials, uint chunk, uint row,
                                   constant AttentionParams& params) {
  const ulong all_values = ulong(params.chunks) * params.rows * params.v.width;
  return partials + all_values + 2 * (ulong(chunk) * params.rows + row);
}

// Query r of the block: (token, head of the key head's group), with the heads of a token side by side.
struct Queries {
  uint first, count, group_heads;

  uint token(uint r) const { return (first + r) / group_heads; }
  uint head(uint r) const { return (first + r) % group_heads; }
  bool has(uint r) const { return first + r < count; }
};

template <typename C, int kSimdgroups, int kValueTiles, int kQueryTiles>
struct Block {
  typedef typename C::Element T;
  static constant constexpr int kQueries = 8 * kQueryTiles;
  static constant constexpr int kTile = 8 * kKeyTiles * kSimdgroups;  // keys
  static constant constexpr int kThreads = kSimdgroups * kSimdWidth;

  // Threadgroup memory, after the queries.
  struct Shared {
    float2 probabilities[kKeyTiles * kSimdgroups * kQueryTiles * kSimdWidth];
    float2 highest[kSimdgroups][kQueries / 2];
    float2 sums[kSimdgroups][kQueries / 2];
    uint seen[kKeyTiles * kSimdgroups];  // a bit for each key that a query sees
  };

  struct Scores {
    float v[kKeyTiles][kQueryTiles][2];
  };
  struct Sums {
    simdgroup_matrix<float, 8, 8> v[kValueTiles][kQueryTiles];
  };

  // Queries as fragments of 8 dimensions x 8 queries, in the order in which lanes hold the dimensions of a
  // key: fragment i of 32 dimensions has in row 2 c + e value (i, e) of the run of lane quarter c.
  static void stage(threadgroup T* target, device const T* q, Queries queries, uint batch, uint key_head,
                    uint thread_index, constant AttentionParams& params) {
    const uint octets = (params.k.width + 31) / 32 * 4;
    for (uint i = thread_index; i < octets * kQueries; i += kThreads) {
      const uint r = i / octets, octet = i % octets;
      const uint head = key_head * queries.group_heads + queries.head(r);
      device const T* source = q + batch * params.q_batch_stride + head * params.q_head_stride +
                               queries.token(r) * params.q_token_stride + 8 * octet;
      UNROLL for (int pair = 0; pair < 4; ++pair) {
        UNROLL for (int e = 0; e < 2; ++e) {
          const uint value = C::value_of(pair, e);
          const bool exists = queries.has(r) && 8 * octet + value < params.k.width;
          const uint tile = (octet / 4 * 4 + pair) * kQueryTiles + r / 8;
          T element = T(0.0f);
          if (exists) element = source[value];
          target[tile * 64 + (octet % 4 * 2 + e) * 8 + r % 8] = element;
        }
      }
    }
  }

  static void run(C keys, C values, device const T* q, device const uchar* mask, device const uchar* sinks,
                  device T* output, device float* partials, threadgroup T* staged, threadgroup Shared& shared,
                  uint3 group, uint lane, uint simdgroup, constant AttentionParams& params) {
    const uint group_heads = params.heads / params.key_heads;
    const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
    const Queries queries = {group.y * kQueries, group_heads * params.tokens, group_heads};
    stage(staged, q, queries, batch, key_head, simdgroup * kSimdWidth + lane, params);

    const LanePlace place(lane);
    const ulong mask_start = batch * params.mask_batch_stride;
    // The keys of the tokens themselves, and what the block sees at most.
    const int before = int(params.keys) - int(params.tokens);
    const int lowest = before + int(queries.token(0));
    const int highest_position =
        before + int(queries.token(min(kQueries - 1u, queries.count - 1 - queries.first)));
    uint begin = params.first_key + group.x * params.chunk, end = min(begin + params.chunk, params.keys);
    if (params.mask_kind == MASK_NONE) {
      end = uint(clamp(highest_position + 1, int(begin), int(end)));
      if (params.window != 0) begin = uint(max(int(begin), lowest - int(params.window) + 1));
    }

    int positions[kQueryTiles][2];
    float highest[kQueryTiles][2], sums[kQueryTiles][2];
    Sums sum_of_values;
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = 8 * t + 2 * place.quarter + e;
        positions[t][e] = queries.has(r) ? before + int(queries.token(r)) : kNoQuery;
        highest[t][e] = kLowest;
        sums[t][e] = 0.0f;
      }
      UNROLL for (int f = 0; f < kValueTiles; ++f) {
        sum_of_values.v[f][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    const uint first_value = (simdgroup * 8 + place.row) * kValueTiles;  // of the lane's value dimensions
    const bool has_values = simdgroup * 8 * kValueTiles < params.v.width;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint tile = begin; tile < end; tile += kTile) {
      const bool inside = params.mask_kind == MASK_NONE && tile + kTile <= end &&
                          int(tile + kTile) <= lowest + 1 &&
                          (params.window == 0 || highest_position - int(tile) < int(params.window));
      Scores scores;
      uint seen[kKeyTiles];
      const uint own = 8 * kKeyTiles * simdgroup + place.row;  // the first of the lane's keys in the tile
      bool any = inside;
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        seen[n] = 1;
        if (!inside) {
          const uint key = tile + own + 8 * n;
          seen[n] = 0;
          UNROLL for (int t = 0; t < kQueryTiles; ++t) {
            UNROLL for (int e = 0; e < 2; ++e) {
              if (key < end && bias_of(mask, mask_start, positions[t][e], key, params) != -INFINITY)
                seen[n] = 1;
            }
          }
          seen[n] |= simd_shuffle_xor(seen[n], ushort(1));
          seen[n] |= simd_shuffle_xor(seen[n], ushort(8));
          any = ballot(seen[n] != 0) != 0 || any;
        }
      }
      if (any) score(scores, keys, staged, tile, own, seen, place, params);

      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        float most[2];
        UNROLL for (int e = 0; e < 2; ++e) {
          most[e] = -INFINITY;
          UNROLL for (int n = 0; n < kKeyTiles; ++n) {
            const uint key = tile + own + 8 * n;
            float x = any ? scores.v[n][t][e] * params.scale : 0.0f;
            if (params.softcap != 0.0f) x = params.softcap * precise::tanh(x / params.softcap);
            if (!inside) {
              float bias = -INFINITY;
              if (key < end && seen[n] != 0) bias = bias_of(mask, mask_start, positions[t][e], key, params);
              x = bias == -INFINITY ? -INFINITY : x + bias;
            }
            scores.v[n][t][e] = x;
            most[e] = max(most[e], x);
          }
          most[e] = max_of_column(most[e]);
        }
        if (place.row == 0) shared.highest[simdgroup][4 * t + place.quarter] = float2(most[0], most[1]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        float2 most = float2(highest[t][0], highest[t][1]);
        UNROLL for (int s = 0; s < kSimdgroups; ++s) most =
            max(most, shared.highest[s][4 * t + place.quarter]);
        float factors[2];
        UNROLL for (int e = 0; e < 2; ++e) {
          factors[e] = precise::exp(highest[t][e] - most[e]);
          highest[t][e] = most[e];
          sums[t][e] *= factors[e];
        }
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          float2 two;
          UNROLL for (int e = 0; e < 2; ++e) {
            two[e] = precise::exp(scores.v[n][t][e] - highest[t][e]);
            sums[t][e] += two[e];
          }
          shared.probabilities[((simdgroup * kKeyTiles + n) * kQueryTiles + t) * kSimdWidth + lane] = two;
        }
        UNROLL for (int f = 0; f < kValueTiles; ++f) {
          UNROLL for (int e = 0; e < 2; ++e) sum_of_values.v[f][t].thread_elements()[e] *= factors[e];
        }
      }
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        const uint bits = inside ? 0xffu : column_bits(seen[n]);
        if (lane == 0) shared.seen[simdgroup * kKeyTiles + n] = bits;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (has_values) add_values(sum_of_values, values, shared, tile, first_value, place, lane, params);
    }

    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      const float2 two = float2(sum_of_column(sums[t][0]), sum_of_column(sums[t][1]));
      if (place.row == 0) shared.sums[simdgroup][4 * t + place.quarter] = two;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      float2 total = float2(0.0f);
      UNROLL for (int s = 0; s < kSimdgroups; ++s) total += shared.sums[s][4 * t + place.quarter];
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = 8 * t + 2 * place.quarter + e;
        if (!queries.has(r)) continue;
        const uint head = key_head * group_heads + queries.head(r);
        const uint row = (batch * params.tokens + queries.token(r)) * params.heads + head;
        const Total own = {highest[t][e], total[e]};
        const bool merged = params.chunks > 1;
        const float factor = merged ? 1.0f : final_factor(own, sinks, head, params);
        device float* partial = merged ? partial_values(partials, group.x, row, params) : partials;
        UNROLL for (int f = 0; f < kValueTiles; ++f) {
          const uint column = first_value + f;
          if (column >= params.v.width) break;
          const float value = sum_of_values.v[f][t].thread_elements()[e];
          if (merged) {
            partial[column] = value;
          } else {
            output[ulong(row) * params.v.width + column] = T(value * factor);
          }
        }
        if (merged && simdgroup == 0 && place.row == 0) {
          partial_total(partials, group.x, row, params)[0] = own.highest;
          partial_total(partials, group.x, row, params)[1] = own.sum;
        }
      }
    }
  }

  // A bit for each row of a matrix whose lanes hold a value other than 0, the same in all lanes of the row.
  static uint column_bits(uint seen) {
    const uint lanes = ballot(seen != 0);  // row r = 4 a + b is in lane 16 a + 2 b
    uint bits = 0;
    UNROLL for (int r = 0; r < 8; ++r) bits |= (lanes >> (r / 4 * 16 + r % 4 * 2) & 1) << r;
    return bits;
  }

  // The dot products of the simdgroup's keys and all queries.
  static void score(thread Scores& scores, C keys, threadgroup const T* staged, uint tile, uint own,
                    thread const uint* seen, LanePlace place, constant AttentionParams& params) {
    simdgroup_matrix<float, 8, 8> products[kKeyTiles][kQueryTiles];
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        products[n][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    threadgroup const T* queries = staged + place.row * 8 + 2 * place.quarter;
    ROLLED for (uint column = 8 * place.quarter; column < (params.k.width + 31) / 32 * 32; column += 32) {
      typename C::template Run<8> runs[kKeyTiles];
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        runs[n] = keys.template load<8>(tile, own + 8 * n, column, seen[n] != 0);
      }
      UNROLL for (int i = 0; i < 4; ++i) {
        simdgroup_matrix<float, 8, 8> fragments[kKeyTiles];
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          const float2 two = C::template pair<8>(runs[n], i);
          fragments[n].thread_elements()[0] = two.x;
          fragments[n].thread_elements()[1] = two.y;
        }
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          simdgroup_matrix<float, 8, 8> query;
          const vec<T, 2> two =
              *reinterpret_cast<threadgroup const vec<T, 2>*>(queries + (i * kQueryTiles + t) * 64);
          query.thread_elements()[0] = float(two.x);
          query.thread_elements()[1] = float(two.y);
          UNROLL for (int n = 0; n < kKeyTiles; ++n) {
            simdgroup_multiply_accumulate(products[n][t], fragments[n], query, products[n][t]);
          }
        }
      }
      queries += 4 * kQueryTiles * 64;
    }
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        UNROLL for (int e = 0; e < 2; ++e) scores.v[n][t][e] = products[n][t].thread_elements()[e];
      }
    }
  }

  // Value dimensions x keys times keys x queries, 8 keys at a time. A lane has kValueTiles dimensions of two
  // keys: an element of each in every fragment.
  static void add_values(thread Sums& sums, C values, threadgroup const Shared& shared, uint tile,
                         uint first_value, LanePlace place, uint lane, constant AttentionParams& params) {
    ROLLED for (uint n = 0; n < kKeyTiles * kSimdgroups; ++n) {
      const uint bits = shared.seen[n] >> (2 * place.quarter), any = shared.seen[n];
      if (any == 0) continue;
      typename C::template Run<kValueTiles> runs[2];
      UNROLL for (int e = 0; e < 2; ++e) {
        runs[e] = values.template load<kValueTiles>(tile, 8 * n + 2 * place.quarter + e, first_value,
                                                    (bits >> e & 1) != 0);
      }
      const RunValues<kValueTiles> first = values_of<C, kValueTiles>(runs[0]);
      const RunValues<kValueTiles> second = values_of<C, kValueTiles>(runs[1]);
      simdgroup_matrix<float, 8, 8> probabilities[kQueryTiles];
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        const float2 two = shared.probabilities[(n * kQueryTiles + t) * kSimdWidth + lane];
        probabilities[t].thread_elements()[0] = two.x;
        probabilities[t].thread_elements()[1] = two.y;
      }
      UNROLL for (int f = 0; f < kValueTiles; ++f) {
        simdgroup_matrix<float, 8, 8> tile;
        tile.thread_elements()[0] = first.v[f];
        tile.thread_elements()[1] = second.v[f];
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          simdgroup_multiply_accumulate(sums.v[f][t], tile, probabilities[t], sums.v[f][t]);
        }
      }
    }
  }
};

template <typename C, int kSimdgroups, int kValueTiles, int kQueryTiles>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups* kSimdWidth)]] void attention_block(
    device const typename C::Element* q [[buffer(0)]], device const uchar* k [[buffer(1)]],
    device const uchar* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
    device const uchar* sinks [[buffer(4)]], device typename C::Element* output [[buffer(5)]],
    device float* partials [[buffer(6)]], device const typename C::Element* k_scales [[buffer(7)]],
    device const typename C::Element* k_biases [[buffer(8)]],
    device const typename C::Element* v_scales [[buffer(9)]],
    device const typename C::Element* v_biases [[buffer(10)]],
    constant AttentionParams& params [[buffer(11)]],
    threadgroup typename C::Element* staged [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Block<C, kSimdgroups, kValueTiles, kQueryTiles> B;
  threadgroup typename B::Shared shared;
  const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
  const C keys(k, k_scales, k_biases, batch, key_head, params.k);
  const C values(v, v_scales, v_biases, batch, key_head, params.v);
  B::run(keys, values, q, mask, sinks, output, partials, staged, shared, group, lane, simdgroup, params);
}

// A simdgroup takes some columns of a query and adds up its chunks in ascending order.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMergeSimdgroups* kSimdWidth)]] void attention_merge(
    device float* partials [[buffer(0)]], device const uchar* sinks [[buffer(1)]],
    device T* output [[buffer(2)]], constant AttentionParams& params [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group.x * kMergeSimdgroups + simdgroup;
  if (row >= params.rows) return;
  Total total = {kLowest, 0.0f};
  for (uint chunk = lane; chunk < params.chunks; chunk += kSimdWidth) {
    total.highest = max(total.highest, partial_total(partials, chunk, row, params)[0]);
  }
  total.highest = simd_max(total.highest);
  float values[kMergeColumns];
  UNROLL for (uint i = 0; i < kMergeColumns; ++i) values[i] = 0.0f;
  const uint first = group.y * kMergeColumns * kSimdWidth + lane;
  for (uint chunk = 0; chunk < params.chunks; ++chunk) {
    device const float* of_chunk = partial_total(partials, chunk, row, params);
    const float factor = precise::exp(of_chunk[0] - total.highest);
    total.sum += factor * of_chunk[1];
    device const float* source = partial_values(partials, chunk, row, params);
    UNROLL for (uint i = 0; i < kMergeColumns; ++i) {
      const uint column = first + i * kSimdWidth;
      if (column < params.v.width) values[i] += factor * source[column];
    }
  }
  const float factor = final_factor(total, sinks, row % params.heads, params);
  UNROLL for (uint i = 0; i < kMergeColumns; ++i) {
    const uint column = first + i * kSimdWidth;
    if (column < params.v.width) output[ulong(row) * params.v.width + column] = T(values[i] * factor);
  }
}

// Four elements of a key or value a lane, a group in 8, 16 or 32 neighbouring lanes: its lowest and highest
// number, then its codes, each lane's in a word.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kCacheThreads)]] void write_cache_quantized(
    device const T* states [[buffer(0)]], device uint* packed [[buffer(1)]], device T* scales [[buffer(2)]],
    device T* biases [[buffer(3)]], constant CacheWriteParams& params [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]]) {
  const bool exists = thread_index < params.threads;
  const uint index = exists ? thread_index : params.threads - 1;  // all lanes take part in the shuffles
  const uint word = index % params.words, row = index / params.words;
  const uint token = row % params.tokens, head = row / params.tokens % params.heads;
  const uint batch = row / params.tokens / params.heads;
  device const T* source = states + batch * params.batch_stride + head * params.head_stride +
                           token * params.token_stride + 4 * word;
  const float4 x = float4(*reinterpret_cast<device const vec<T, 4>*>(source));
  float low = min(min(x.x, x.y), min(x.z, x.w)), high = max(max(x.x, x.y), max(x.z, x.w));
  const float4 zeros = x * 0.0f;
  float not_finite = zeros.x + zeros.y + zeros.z + zeros.w;  // NaN if any number is infinite or NaN
  for (uint distance = 1; distance < params.group_words; distance *= 2) {
    low = min(low, simd_shuffle_xor(low, ushort(distance)));
    high = max(high, simd_shuffle_xor(high, ushort(distance)));
    not_finite += simd_shuffle_xor(not_finite, ushort(distance));
  }
  const T scale = T((high - low) / 254.0f);
  uint codes = 0;
  if (float(scale) > 0.0f && not_finite == 0.0f) {
    const float4 numbers = min(rint((x - low) / float(scale)), 255.0f);
    codes = uint(numbers.x) | uint(numbers.y) << 8 | uint(numbers.z) << 16 | uint(numbers.w) << 24;
  }
  if (!exists) return;
  packed[params.packed.first + batch * params.packed.batch_stride + head * params.packed.head_stride +
         token * params.packed.key_stride + word] = codes;
  if (word % params.group_words != 0) return;
  const uint group = word / params.group_words;
  const ulong place = params.groups.first + batch * params.groups.batch_stride +
                      head * params.groups.head_stride + token * params.groups.key_stride + group;
  scales[place] = scale;
  biases[place] = T(low + not_finite);
}
