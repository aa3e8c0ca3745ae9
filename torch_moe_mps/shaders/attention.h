// Attention of a block of queries of one key head over its keys.
//
// A threadgroup takes 8 * kQueryTiles queries, of several heads and tokens, and a range of the keys. Teams of
// simdgroups take tiles of these in turn, kKeyTiles * 8 keys for each simdgroup. Scores are keys x queries: a
// simdgroup multiplies its own keys with all queries. Their exponentials go to the team through threadgroup
// memory, and each of its simdgroups sums all values of the tile for its own part of the value head. At the
// end the sums of the teams are added. So each key and value is read once for all queries of the block,
// straight into matrix fragments (see MatrixPlace), and a thread needs no more registers for wider heads:
// these have larger teams.
#pragma once
#include <metal_simdgroup_matrix>

#include "common.h"

// Keeps the compiler from unrolling: several rounds in flight would take too many registers.
#define ROLLED _Pragma("clang loop unroll(disable)")

constant constexpr float kLowest = -3.402823466e38f;
constant constexpr int kNoQuery = -(1 << 30);  // in place of a position
constant constexpr int kKeyTiles = 2;          // of 8 keys, of a simdgroup: half as many barriers as with one

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
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kRelative = false;
  static constant constexpr int kPerWord = 4 / sizeof(T);
  static constant constexpr bool kQuantized = false;
  static constant constexpr int kRunsAtOnce = kPerWord;

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

  // Zeros past the end of the head, and for a key that is not used.
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
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kRelative = false;
  static constant constexpr bool kQuantized = true;
  static constant constexpr int kRunsAtOnce = 2;

  template <int N>
  struct Run {
    Words<N / 4> words;
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
    run.words = load_words<N / 4>(reinterpret_cast<device const uint*>(source));
    const uint group = key * scales_stride + (column >> group_shift);
    run.scale = (scales + ulong(tile) * scales_stride)[group];
    run.bias = (biases + ulong(tile) * scales_stride)[group];
    return run;
  }

  // Two codes 16 bits apart become the mantissas of two halves, which takes no conversion from integers.
  static int value_of(int pair, int element) { return 4 * (pair / 2) + pair % 2 + 2 * element; }
  template <int N>
  static float2 pair(Run<N> run, int index) {
    const uint codes = (run.words.v[index / 2] >> (8 * (index % 2))) & 0x00ff00ffu;
    half2 numbers = as_type<half2>(codes | 0x64006400u);
    const float scale = float(run.scale);
    float bias = float(run.bias);
    if constexpr (sizeof(T) == 4) {
      numbers -= half2(1024.0h);
    } else {
      bias = fma(-1024.0f, scale, bias);  // rounded by far less than 16 bits are
    }
    return float2(fma(float(numbers.x), scale, bias), fma(float(numbers.y), scale, bias));
  }
};

// Keys or values of which indices select some: key i of a tile is that of an index.
template <typename C>
struct Selected : C {
  static constant constexpr bool kSelects = true;

  device const int* indices;
  uint block, stored;  // keys of an index, and of the cache

  Selected(device const uchar* values, device const typename C::Element* scales,
           device const typename C::Element* biases, uint batch, uint head, constant CacheParams& params)
      : C(values, scales, biases, batch, head, params) {}

  void select(device const int* indices_, uint, constant AttentionParams& params) {
    indices = indices_;
    block = params.index_block;
    stored = params.indexed_keys;
  }

  // The key of the cache; `stored` or more if an index is none.
  uint row(uint key) const {
    if (block == 1) return uint(indices[key]);
    const int index = indices[key / block];
    const ulong found = ulong(uint(index)) * block + key % block;
    return index < 0 || found >= stored ? stored : uint(found);
  }
  bool has(uint key) const { return row(key) < stored; }

  template <int N>
  typename C::template Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    return C::template load<N>(wanted ? row(tile + key) : 0, 0, column, wanted);
  }
};

// Keys or values of which one token sees all that it is given.
template <typename C>
struct Whole : C {
  static constant constexpr bool kSelects = true;

  Whole(device const uchar* values, device const typename C::Element* scales,
        device const typename C::Element* biases, uint batch, uint head, constant CacheParams& params)
      : C(values, scales, biases, batch, head, params) {}
  void select(device const int*, uint, constant AttentionParams&) {}
  bool has(uint) const { return true; }
};

// Keys or values of a window and of a tail. The slots of a token are keys of the tail, those of indices or
// all, and behind them its own key and what lies before it. The tail is in place of the scales.
template <typename C>
struct Tailed : C {
  typedef typename C::Element T;
  static constant constexpr bool kSelects = true;

  device const T* tail;
  device const int* indices;
  uint tail_stride, slots, limit;
  int own;
  bool selects;

  Tailed(device const uchar* values, device const T* tail_, device const T*, uint batch, uint head,
         constant CacheParams& params)
      : C(values, tail_, tail_, batch, head, params),
        tail(tail_ + batch * params.scales_batch_stride + head * params.scales_head_stride),
        tail_stride(params.scales_key_stride) {}

  void select(device const int* indices_, uint token, constant AttentionParams& params) {
    indices = indices_;
    selects = params.index_block != 0;
    slots = params.tail_slots;
    limit = min(params.tail_keys, (params.position + token + 1) / params.tail_rate);
    own = int(params.indexed_keys) - int(params.tokens) + int(token);
  }

  uint row(uint slot) const { return selects ? uint(indices[slot]) : slot; }
  bool has(uint slot) const { return slot < slots ? row(slot) < limit : int(slot - slots) <= own; }

  template <int N>
  typename C::template Run<N> load(uint tile, uint key, uint column, bool wanted) const {
    const uint slot = tile + key;
    C from = *this;
    if (slot < slots) {
      from.start = tail;
      from.stride = tail_stride;
    }
    const uint found = !wanted ? 0 : slot < slots ? row(slot) : uint(own) - (slot - slots);
    return from.template load<N>(found, 0, column, wanted);
  }
};

// Keys or values of which each adds to its score by its distance from the token.
template <typename C>
struct Relative : C {
  static constant constexpr bool kRelative = true;

  Relative(device const uchar* values, device const typename C::Element* scales,
           device const typename C::Element* biases, uint batch, uint head, constant CacheParams& params)
      : C(values, scales, biases, batch, head, params) {}
};

inline float lowest_of(uint dtype) {
  return dtype == DTYPE_FLOAT ? kLowest : dtype == DTYPE_HALF ? -65504.0f : -3.3895313892515355e38f;
}

inline float bias_in_order(int position, uint key, constant AttentionParams& params) {
  const int distance = position - int(key);
  return distance >= 0 && (params.window == 0 || distance < int(params.window)) ? 0.0f : -INFINITY;
}

// What the mask adds to the score of a key: -INFINITY for a key that the token does not see. `position` is
// the last key that the token sees in order, or kNoQuery.
inline float bias_of(device const uchar* mask, ulong start, int position, uint key,
                     constant AttentionParams& params) {
  if (params.mask_kind == MASK_NONE) return bias_in_order(position, key, params);
  if (position == kNoQuery) return -INFINITY;
  const ulong token = ulong(position - params.first_position);
  const uint place = params.mask_kind == MASK_BITS ? key / 32 : key;
  const ulong index = start + token * params.mask_token_stride + ulong(place) * params.mask_key_stride;
  if (params.mask_kind == MASK_BITS) {
    const uint word = reinterpret_cast<device const uint*>(mask)[index];
    return (word >> (key % 32) & 1) != 0 ? 0.0f : -INFINITY;
  }
  if (params.mask_kind == MASK_BOOL) return mask[index] != 0 ? 0.0f : -INFINITY;
  const float bias = load_one(mask, params.mask_dtype, index);
  return bias <= lowest_of(params.mask_dtype) ? -INFINITY : bias;
}

// The results of a query over all its keys, and the sink of its head.
struct Total {
  float highest;
  float sum;
};

// The factor of the summed values; 0 if the query saw no key.
inline float final_factor(Total total, device const uchar* sinks, uint head, uint row,
                          constant AttentionParams& params) {
  if (params.sinks == SINKS_NONE) return total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
  const float sink = load_one(sinks, params.sinks_dtype, params.sinks == SINKS_OF_HEADS ? head : row);
  const float highest = max(total.highest, sink);
  const float factor = precise::exp(total.highest - highest);
  const float sum = total.sum * factor + precise::exp(sink - highest);
  return sum == 0.0f ? 0.0f : factor / sum;
}

// The factor of a result by its gate.
template <typename T>
inline float gate_factor(device const T* gate, uint row, uint column, constant AttentionParams& params) {
  const uint token = row / params.heads;
  const float x =
      float(gate[token / params.tokens * params.gate.batch + token % params.tokens * params.gate.token +
                 row % params.heads * params.gate.head + min(column, params.gate_width - 1)]);
  return params.gate_is_softplus != 0 ? softplus(x) : sigmoid(x);
}

template <typename T>
inline void store_result(device T* output, ulong index, float value, constant AttentionParams& params) {
  if (params.output_is_float != 0) {
    reinterpret_cast<device float*>(output)[index] = value;
  } else {
    output[index] = T(value);
  }
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
  bool one_token;  // which saves divisions: they take as long as many keys of a short chunk
  uint only;       // that token

  uint token(uint r) const { return one_token ? only : (first + r) / group_heads; }
  uint head(uint r) const { return one_token ? first + r : first + r - token(r) * group_heads; }
  bool has(uint r) const { return first + r < count; }
};

// Block `number` of the queries of a key head; with indices, those of a block are of one token.
template <bool kSelects>
inline Queries queries_of_block(uint number, uint size, uint group_heads, constant AttentionParams& params) {
  if constexpr (kSelects) {
    const uint blocks = (group_heads + size - 1) / size;
    return {number % blocks * size, group_heads, group_heads, true, number / blocks};
  } else {
    return {number * size, group_heads * params.tokens, group_heads, params.tokens == 1, 0};
  }
}

// What queries are staged in: 16 of 576 elements fit into threadgroup memory in 16 bits only.
template <typename T, bool kInT>
struct StagedOf {
  typedef float type;
};
template <typename T>
struct StagedOf<T, true> {
  typedef T type;
};

template <typename C, int kTeams, int kMembers, int kValueTiles, int kQueryTiles>
struct Block {
  typedef typename C::Element T;
  static constant constexpr bool kWide = kValueTiles * kQueryTiles > 8;
  typedef typename StagedOf<T, kWide>::type Staged;
  static constant constexpr int kSimdgroups = kTeams * kMembers;
  static constant constexpr int kQueries = 8 * kQueryTiles;
  static constant constexpr int kTeamTile = 8 * kKeyTiles * kMembers;  // keys
  static constant constexpr int kThreads = kSimdgroups * kSimdWidth;
  // How many runs of a key, and matrices of values, a lane loads before it uses the first. With more, it
  // would wait less often, but two tiles of queries leave no registers for more codes and scales.
  static constant constexpr bool kHasRoom = kQueryTiles == 1 || !(C::kQuantized || kWide);
  static constant constexpr int kRunsAtOnce = kHasRoom ? C::kRunsAtOnce : 1;
  static constant constexpr int kValuesAtOnce = kHasRoom ? 2 : 1;
  static constant constexpr int kProbabilities = kKeyTiles * kSimdgroups * kQueryTiles;
  static constant constexpr int kSumsOfLane = kValueTiles * kQueryTiles;  // pairs of numbers
  static constant constexpr int kOtherSums = (kTeams - 1) * kMembers * kSumsOfLane;

  // Threadgroup memory, after the queries.
  struct Shared {
    // Of a tile; at the end, the sums of all teams but the first.
    float2 exchange[(kProbabilities > kOtherSums ? kProbabilities : kOtherSums) * kSimdWidth];
    float2 highest[kSimdgroups][kQueries / 2];
    float2 sums[kSimdgroups][kQueries / 2];
    uint seen[kKeyTiles * kSimdgroups];  // a bit for each key that a query sees
  };

  struct Scores {
    float v[kKeyTiles][kQueryTiles][2];
  };
  // Of a lane's queries, over the keys so far: the highest score, and the sums of the exponentials of scores
  // less that, those of its own keys only, and of the values times these.
  struct Sums {
    float highest[kQueryTiles][2], exponentials[kQueryTiles][2];
    simdgroup_matrix<float, 8, 8> values[kValueTiles][kQueryTiles];
  };

  // Queries as fragments of 8 dimensions x 8 queries, in the order in which lanes hold the dimensions of a
  // key: fragment i of 32 dimensions has in row 2 c + e value (i, e) of the run of lane quarter c.
  static void stage(threadgroup Staged* target, device const T* q, Queries queries, uint batch, uint key_head,
                    uint thread_index, constant AttentionParams& params) {
    const uint r = thread_index % kQueries;
    const uint head = key_head * queries.group_heads + queries.head(r);
    device const T* source = q + batch * params.q_batch_stride + head * params.q_head_stride +
                             queries.token(r) * params.q_token_stride;
    const uint octets = (params.k.width + kQueryColumns - 1) / kQueryColumns * (kQueryColumns / 8);
    for (uint octet = thread_index / kQueries; octet < octets; octet += kThreads / kQueries) {
      threadgroup Staged* fragments =
          target + ((octet / 4 * 4) * kQueryTiles + r / 8) * 64 + octet % 4 * 16 + r % 8;
      UNROLL for (int pair = 0; pair < 4; ++pair) {
        UNROLL for (int e = 0; e < 2; ++e) {
          const uint column = 8 * octet + C::value_of(pair, e);
          const bool exists = queries.has(r) && column < params.k.width;
          fragments[pair * kQueryTiles * 64 + e * 8] = exists ? Staged(source[column]) : Staged(0.0f);
        }
      }
    }
  }

  static void run(C keys, C values, device const T* q, device const uchar* mask, device const int* key_range,
                  device const uchar* sinks, device const T* gate, device T* output, device float* partials,
                  threadgroup Staged* staged, threadgroup Shared& shared, uint3 group, uint lane,
                  uint simdgroup, constant AttentionParams& params) {
    const uint group_heads = params.heads / params.key_heads;
    const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
    const Queries queries = queries_of_block<C::kSelects>(group.y, kQueries, group_heads, params);
    if constexpr (C::kSelects) {
      device const int* indices = key_range + batch * params.index_batch_stride +
                                  key_head * params.index_head_stride +
                                  queries.only * params.index_token_stride;
      keys.select(indices, queries.only, params);
      values.select(indices, queries.only, params);
    }
    stage(staged, q, queries, batch, key_head, simdgroup * kSimdWidth + lane, params);

    const MatrixPlace place(lane);
    const uint team = kTeams == 1 ? 0 : simdgroup / kMembers, member = simdgroup - team * kMembers;
    const ulong mask_start = batch * params.mask_batch_stride + key_head * params.mask_head_stride;
    // The last keys that tokens see in order, and the range of keys that the block can see.
    const int lowest = params.first_position + int(queries.token(0));
    const int highest_position =
        params.first_position + int(queries.token(min(kQueries - 1u, queries.count - 1 - queries.first)));
    uint begin = params.first_key + group.x * params.chunk, end = min(begin + params.chunk, params.keys);
    if (!C::kSelects && params.mask_kind == MASK_NONE) {
      end = uint(clamp(highest_position + 1, int(begin), int(end)));
      if (params.window != 0) begin = uint(max(int(begin), lowest - int(params.window) + 1));
    }
    if (params.has_key_range != 0) {
      begin = uint(max(int(begin), key_range[2 * batch]));
      end = uint(clamp(key_range[2 * batch + 1], 0, int(end)));
    }

    int positions[kQueryTiles][2];
    Sums sums;
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = 8 * t + 2 * place.quarter + e;
        positions[t][e] = queries.has(r) ? params.first_position + int(queries.token(r)) : kNoQuery;
        sums.highest[t][e] = kLowest;
        sums.exponentials[t][e] = 0.0f;
      }
      UNROLL for (int f = 0; f < kValueTiles; ++f) {
        sums.values[f][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    const uint first_value = (member * 8 + place.row) * kValueTiles;  // of the lane's value dimensions
    const bool has_values = member * 8 * kValueTiles < params.v.width;
    // The simdgroup's place in what its team shares, and the team's.
    threadgroup float2* own_probabilities =
        shared.exchange + simdgroup * kKeyTiles * kQueryTiles * kSimdWidth + lane;
    threadgroup float2* probabilities = own_probabilities - member * kKeyTiles * kQueryTiles * kSimdWidth;
    threadgroup uint* seen_of_team = shared.seen + team * kMembers * kKeyTiles;
    threadgroup float2* highest_of_team = shared.highest[team * kMembers] + place.quarter;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint step = begin; step < end; step += kTeams * kTeamTile) {
      const uint tile = step + team * kTeamTile;
      const bool inside = !C::kSelects && params.mask_kind == MASK_NONE && tile + kTeamTile <= end &&
                          int(tile + kTeamTile) <= lowest + 1 &&
                          (params.window == 0 || highest_position - int(tile) < int(params.window));
      Scores scores;
      uint seen[kKeyTiles];
      const uint own = 8 * kKeyTiles * member + place.row;  // the first of the lane's keys in the tile
      bool any = inside;
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        seen[n] = 1;
        if (!inside) {
          const uint key = tile + own + 8 * n;
          seen[n] = 0;
          UNROLL for (int t = 0; t < kQueryTiles; ++t) {
            UNROLL for (int e = 0; e < 2; ++e) {
              if (key < end && bias_of_key(keys, mask, mask_start, positions[t][e], key, params) != -INFINITY)
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
            if constexpr (C::kRelative)
              x += of_distance(mask, mask_start, queries.first + 8 * t + 2 * place.quarter + e,
                               positions[t][e], key, params);
            if (!inside) {
              float bias = -INFINITY;
              if (key < end && seen[n] != 0)
                bias = bias_of_key(keys, mask, mask_start, positions[t][e], key, params);
              x = bias == -INFINITY ? -INFINITY : x + bias;
            }
            scores.v[n][t][e] = x;
            most[e] = max(most[e], x);
          }
          most[e] = max_of_column(most[e]);
        }
        if (place.row == 0) highest_of_team[member * (kQueries / 2) + 4 * t] = float2(most[0], most[1]);
      }
      team_barrier();

      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        float2 most = float2(sums.highest[t][0], sums.highest[t][1]);
        UNROLL for (int m = 0; m < kMembers; ++m) {
          most = max(most, highest_of_team[m * (kQueries / 2) + 4 * t]);
        }
        raise(sums, t, most);
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          float2 two;
          UNROLL for (int e = 0; e < 2; ++e) {
            two[e] = precise::exp(scores.v[n][t][e] - most[e]);
            sums.exponentials[t][e] += two[e];
          }
          own_probabilities[(n * kQueryTiles + t) * kSimdWidth] = two;
        }
      }
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        const uint bits = inside ? 0xffu : column_bits(seen[n]);
        if (lane == 0) seen_of_team[member * kKeyTiles + n] = bits;
      }
      team_barrier();
      if (has_values) add_values(sums, values, probabilities, seen_of_team, tile, first_value, place);
    }

    if constexpr (kTeams > 1) raise_all(sums, shared, simdgroup, place);
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      const float2 two =
          float2(sum_of_column(sums.exponentials[t][0]), sum_of_column(sums.exponentials[t][1]));
      if (place.row == 0) shared.sums[simdgroup][4 * t + place.quarter] = two;
    }
    if (kTeams > 1 && team != 0) give_sums(sums, shared, team, member, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kTeams > 1 && team != 0) return;
    take_sums(sums, shared, member, lane);
    float2 totals[kQueryTiles];
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      totals[t] = float2(0.0f);
      UNROLL for (int s = 0; s < kSimdgroups; ++s) totals[t] += shared.sums[s][4 * t + place.quarter];
    }
    // One branch for those without a gate.
    if (params.gate_width != 0 && params.chunks == 1)
      apply_gate(sums, gate, queries, batch * params.tokens, key_head * group_heads, first_value, place,
                 params);
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = 8 * t + 2 * place.quarter + e;
        if (!queries.has(r)) continue;
        const uint head = key_head * group_heads + queries.head(r);
        const uint row = (batch * params.tokens + queries.token(r)) * params.heads + head;
        const Total own = {sums.highest[t][e], totals[t][e]};
        const bool merged = params.chunks > 1;
        const float factor = merged ? 1.0f : final_factor(own, sinks, head, row, params);
        device float* partial = merged ? partial_values(partials, group.x, row, params) : partials;
        UNROLL for (int f = 0; f < kValueTiles; ++f) {
          const uint column = first_value + f;
          if (column >= params.v.width) break;
          const float value = sums.values[f][t].thread_elements()[e];
          if (merged) {
            partial[column] = value;
          } else {
            store_result(output, ulong(row) * params.v.width + column, value * factor, params);
          }
        }
        if (merged && member == 0 && place.row == 0) {
          partial_total(partials, group.x, row, params)[0] = own.highest;
          partial_total(partials, group.x, row, params)[1] = own.sum;
        }
      }
    }
  }

  static void apply_gate(thread Sums& sums, device const T* gate, Queries queries, uint first_token,
                         uint first_head, uint first_value, MatrixPlace place,
                         constant AttentionParams& params) {
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = 8 * t + 2 * place.quarter + e;
        if (!queries.has(r)) continue;
        const uint row = (first_token + queries.token(r)) * params.heads + first_head + queries.head(r);
        UNROLL for (int f = 0; f < kValueTiles; ++f) {
          const uint column = first_value + f;
          if (column >= params.v.width) break;
          sums.values[f][t].thread_elements()[e] *= gate_factor(gate, row, column, params);
        }
      }
    }
  }

  // What the relative position of a key adds to its score, for query r of the key head; 0 for hidden keys.
  static float of_distance(device const uchar* relative, ulong start, uint r, int position, uint key,
                           constant AttentionParams& params) {
    const int distance = position - int(key);
    if (distance < 0 || distance >= int(params.relative_extent)) return 0.0f;
    const uint token = uint(position - params.first_position);
    const uint head = r - token * (params.heads / params.key_heads);
    const ulong row = start + head * params.relative_head_stride + ulong(token) * params.mask_token_stride;
    return float(reinterpret_cast<device const T*>(relative)[row + distance]);
  }

  static float bias_of_key(C keys, device const uchar* mask, ulong start, int position, uint key,
                           constant AttentionParams& params) {
    if constexpr (C::kSelects) {
      return keys.has(key) ? 0.0f : -INFINITY;
    } else if constexpr (C::kRelative) {
      return bias_in_order(position, key, params);
    } else {
      return bias_of(mask, start, position, key, params);
    }
  }

  static void team_barrier() {
    if constexpr (kMembers == 1) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // The same sums, of the exponentials of scores less `most`.
  static void raise(thread Sums& sums, int t, float2 most) {
    UNROLL for (int e = 0; e < 2; ++e) {
      const float factor = precise::exp(sums.highest[t][e] - most[e]);
      sums.highest[t][e] = most[e];
      sums.exponentials[t][e] *= factor;
      UNROLL for (int f = 0; f < kValueTiles; ++f) sums.values[f][t].thread_elements()[e] *= factor;
    }
  }

  // To the highest score of all teams.
  static void raise_all(thread Sums& sums, threadgroup Shared& shared, uint simdgroup, MatrixPlace place) {
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      const float2 own = float2(sums.highest[t][0], sums.highest[t][1]);
      if (place.row == 0) shared.highest[simdgroup][4 * t + place.quarter] = own;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      float2 most = float2(kLowest);
      UNROLL for (int s = 0; s < kSimdgroups; s += kMembers) {
        most = max(most, shared.highest[s][4 * t + place.quarter]);
      }
      raise(sums, t, most);
    }
  }

  // The sums of the other teams go to the first, which adds them in ascending order.
  static void give_sums(thread Sums& sums, threadgroup Shared& shared, uint team, uint member, uint lane) {
    threadgroup float2* target =
        shared.exchange + ((team - 1) * kMembers + member) * kSumsOfLane * kSimdWidth;
    UNROLL for (int f = 0; f < kValueTiles; ++f) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        target[(f * kQueryTiles + t) * kSimdWidth + lane] =
            float2(sums.values[f][t].thread_elements()[0], sums.values[f][t].thread_elements()[1]);
      }
    }
  }
  static void take_sums(thread Sums& sums, threadgroup const Shared& shared, uint member, uint lane) {
    UNROLL for (int team = 1; team < kTeams; ++team) {
      threadgroup const float2* source =
          shared.exchange + ((team - 1) * kMembers + member) * kSumsOfLane * kSimdWidth;
      UNROLL for (int f = 0; f < kValueTiles; ++f) {
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          const float2 two = source[(f * kQueryTiles + t) * kSimdWidth + lane];
          sums.values[f][t].thread_elements()[0] += two.x;
          sums.values[f][t].thread_elements()[1] += two.y;
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
  static void score(thread Scores& scores, C keys, threadgroup const Staged* staged, uint tile, uint own,
                    thread const uint* seen, MatrixPlace place, constant AttentionParams& params) {
    simdgroup_matrix<float, 8, 8> products[kKeyTiles][kQueryTiles];
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        products[n][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    threadgroup const Staged* queries = staged + place.row * 8 + 2 * place.quarter;
    ROLLED for (uint first = 0; first < params.k.width; first += 32 * kRunsAtOnce) {
      typename C::template Run<8> runs[kRunsAtOnce][kKeyTiles];
      UNROLL for (int r = 0; r < kRunsAtOnce; ++r) {
        const uint column = first + 32 * r + 8 * place.quarter;
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          runs[r][n] = keys.template load<8>(tile, own + 8 * n, column, seen[n] != 0);
        }
      }
      UNROLL for (int i = 0; i < 4 * kRunsAtOnce; ++i) {
        simdgroup_matrix<float, 8, 8> fragments[kKeyTiles];
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          const float2 two = C::template pair<8>(runs[i / 4][n], i % 4);
          fragments[n].thread_elements()[0] = two.x;
          fragments[n].thread_elements()[1] = two.y;
        }
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          simdgroup_matrix<float, 8, 8> query;
          const float2 two = float2(
              *reinterpret_cast<threadgroup const vec<Staged, 2>*>(queries + (i * kQueryTiles + t) * 64));
          query.thread_elements()[0] = two.x;
          query.thread_elements()[1] = two.y;
          UNROLL for (int n = 0; n < kKeyTiles; ++n) {
            simdgroup_multiply_accumulate(products[n][t], fragments[n], query, products[n][t]);
          }
        }
      }
      queries += 4 * kRunsAtOnce * kQueryTiles * 64;
    }
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        UNROLL for (int e = 0; e < 2; ++e) scores.v[n][t][e] = products[n][t].thread_elements()[e];
      }
    }
  }

  // Value dimensions x keys times keys x queries, 8 keys at a time. A lane has kValueTiles dimensions of two
  // keys: an element of each in every fragment.
  static void add_values(thread Sums& sums, C values, threadgroup const float2* shared,
                         threadgroup const uint* seen, uint tile, uint first_value, MatrixPlace place) {
    constexpr int kRound = kValuesAtOnce * kQueryTiles * kSimdWidth;
    ROLLED for (uint first = 0; first < kKeyTiles * kMembers; first += kValuesAtOnce, shared += kRound) {
      uint any = 0;
      UNROLL for (int n = 0; n < kValuesAtOnce; ++n) any |= seen[first + n];
      if (any == 0) continue;
      typename C::template Run<kValueTiles> runs[kValuesAtOnce][2];
      UNROLL for (int n = 0; n < kValuesAtOnce; ++n) {
        const uint bits = seen[first + n] >> (2 * place.quarter);
        UNROLL for (int e = 0; e < 2; ++e) {
          runs[n][e] = values.template load<kValueTiles>(tile, 8 * (first + n) + 2 * place.quarter + e,
                                                         first_value, (bits >> e & 1) != 0);
        }
      }
      UNROLL for (int n = 0; n < kValuesAtOnce; ++n) {
        simdgroup_matrix<float, 8, 8> probabilities[kQueryTiles];
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          const float2 two = shared[(n * kQueryTiles + t) * kSimdWidth];
          probabilities[t].thread_elements()[0] = two.x;
          probabilities[t].thread_elements()[1] = two.y;
        }
        UNROLL for (int i = 0; i < kValueTiles / 2; ++i) {
          const float2 of_key = C::template pair<kValueTiles>(runs[n][0], i);
          const float2 of_next = C::template pair<kValueTiles>(runs[n][1], i);
          UNROLL for (int e = 0; e < 2; ++e) {
            simdgroup_matrix<float, 8, 8> matrix;
            matrix.thread_elements()[0] = of_key[e];
            matrix.thread_elements()[1] = of_next[e];
            const int f = C::value_of(i, e);
            UNROLL for (int t = 0; t < kQueryTiles; ++t) {
              simdgroup_multiply_accumulate(sums.values[f][t], matrix, probabilities[t], sums.values[f][t]);
            }
          }
        }
      }
    }
  }
};

template <typename C, int kTeams, int kMembers, int kValueTiles, int kQueryTiles>
[[kernel, max_total_threads_per_threadgroup(kTeams* kMembers* kSimdWidth)]] void attention_block(
    device const typename C::Element* q [[buffer(0)]], device const uchar* k [[buffer(1)]],
    device const uchar* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
    device const uchar* sinks [[buffer(4)]], device typename C::Element* output [[buffer(5)]],
    device float* partials [[buffer(6)]], device const typename C::Element* k_scales [[buffer(7)]],
    device const typename C::Element* k_biases [[buffer(8)]],
    device const typename C::Element* v_scales [[buffer(9)]],
    device const typename C::Element* v_biases [[buffer(10)]], device const int* key_range [[buffer(11)]],
    device const typename C::Element* gate [[buffer(12)]], constant AttentionParams& params [[buffer(13)]],
    threadgroup uchar* staged [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Block<C, kTeams, kMembers, kValueTiles, kQueryTiles> B;
  threadgroup typename B::Shared shared;
  const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
  const C keys(k, k_scales, k_biases, batch, key_head, params.k);
  const C values(v, v_scales, v_biases, batch, key_head, params.v);
  B::run(keys, values, q, mask, key_range, sinks, gate, output, partials,
         reinterpret_cast<threadgroup typename B::Staged*>(staged), shared, group, lane, simdgroup, params);
}

// A threadgroup takes some columns of a query. Its simdgroups take chunks in turn, and the first ones add up
// what they have, in ascending order.
template <typename T, bool kGated>
[[kernel, max_total_threads_per_threadgroup(kMergeSimdgroups* kSimdWidth)]] void attention_merge(
    device float* partials [[buffer(0)]], device const uchar* sinks [[buffer(1)]],
    device const T* gate [[buffer(2)]], device T* output [[buffer(3)]],
    constant AttentionParams& params [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float shared_values[kMergeSimdgroups][kMergeColumns * kSimdWidth];
  threadgroup float shared_sums[kMergeSimdgroups];
  const uint row = group.x, first_column = group.y * kMergeColumns * kSimdWidth;
  Total total = {kLowest, 0.0f};
  for (uint chunk = lane; chunk < params.chunks; chunk += kSimdWidth) {
    total.highest = max(total.highest, partial_total(partials, chunk, row, params)[0]);
  }
  total.highest = simd_max(total.highest);

  float values[kMergeColumns] = {}, sum = 0.0f;
  for (uint first = simdgroup; first < params.chunks; first += kMergeChunks * kMergeSimdgroups) {
    float highest[kMergeChunks], sums[kMergeChunks], of_chunk[kMergeChunks][kMergeColumns];
    UNROLL for (uint i = 0; i < kMergeChunks; ++i) {
      const uint chunk = first + i * kMergeSimdgroups;
      highest[i] = -INFINITY;
      sums[i] = 0.0f;
      UNROLL for (uint c = 0; c < kMergeColumns; ++c) of_chunk[i][c] = 0.0f;
      if (chunk >= params.chunks) continue;
      highest[i] = partial_total(partials, chunk, row, params)[0];
      sums[i] = partial_total(partials, chunk, row, params)[1];
      device const float* source = partial_values(partials, chunk, row, params) + first_column;
      UNROLL for (uint c = 0; c < kMergeColumns; ++c) {
        const uint column = c * kSimdWidth + lane;
        if (first_column + column < params.v.width) of_chunk[i][c] = source[column];
      }
    }
    UNROLL for (uint i = 0; i < kMergeChunks; ++i) {
      const float factor = precise::exp(highest[i] - total.highest);
      sum = fma(factor, sums[i], sum);
      UNROLL for (uint c = 0; c < kMergeColumns; ++c) values[c] = fma(factor, of_chunk[i][c], values[c]);
    }
  }
  UNROLL for (uint c = 0; c < kMergeColumns; ++c) shared_values[simdgroup][c * kSimdWidth + lane] = values[c];
  if (lane == 0) shared_sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint column = first_column + thread_index;
  if (thread_index >= kMergeColumns * kSimdWidth || column >= params.v.width) return;
  float value = 0.0f;
  UNROLL for (uint s = 0; s < kMergeSimdgroups; ++s) {
    total.sum += shared_sums[s];
    value += shared_values[s][thread_index];
  }
  const float factor = final_factor(total, sinks, row % params.heads, row, params);
  if constexpr (kGated) value *= gate_factor(gate, row, column, params);
  store_result(output, ulong(row) * params.v.width + column, value * factor, params);
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
  const ulong key = params.start + token;
  packed[batch * params.packed.batch_stride + head * params.packed.head_stride +
         key * params.packed.key_stride + word] = codes;
  if (word % params.group_words != 0) return;
  const uint group = word / params.group_words;
  const ulong place = batch * params.groups.batch_stride + head * params.groups.head_stride +
                      key * params.groups.key_stride + group;
  scales[place] = scale;
  biases[place] = T(low + not_finite);
}

// The blocks of 8 or 16 queries for values of up to so many elements.
#define INSTANTIATE_ATTENTION(name)                              \
  INSTANTIATE(name "8_64", attention_block<Cache, 4, 1, 8, 1>)   \
  INSTANTIATE(name "8_128", attention_block<Cache, 2, 2, 8, 1>)  \
  INSTANTIATE(name "8_256", attention_block<Cache, 1, 4, 8, 1>)  \
  INSTANTIATE(name "8_512", attention_block<Cache, 1, 8, 8, 1>)  \
  INSTANTIATE(name "16_64", attention_block<Cache, 2, 2, 4, 2>)  \
  INSTANTIATE(name "16_128", attention_block<Cache, 1, 4, 4, 2>) \
  INSTANTIATE(name "16_256", attention_block<Cache, 1, 8, 4, 2>)
