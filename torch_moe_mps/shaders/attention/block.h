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

#include "attention/queries.h"
#include "attention/scores.h"
#include "common/simdgroups.h"
#include "geometry/attention.h"

// Reductions over the lanes that hold the same column.
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

typedef simdgroup_matrix<float, 8, 8> Matrix;

inline Matrix matrix_of(float2 two) {
  Matrix matrix;
  matrix.thread_elements()[0] = two.x;
  matrix.thread_elements()[1] = two.y;
  return matrix;
}

inline float2 elements_of(Matrix matrix) {
  return float2(matrix.thread_elements()[0], matrix.thread_elements()[1]);
}

// Type that queries are staged in: 16 of 576 elements fit into threadgroup memory in 16 bits only.
template <typename T, bool kInT>
struct StagedOf {
  typedef float type;
};
template <typename T>
struct StagedOf<T, true> {
  typedef T type;
};

// C is DenseCache or QuantizedCache, or what reads one of them in another way. That has the cache, which says
// how keys are stored: Metal has no derived classes. kKeyTiles, each of 8 keys, are those of a simdgroup: two
// take half as many barriers as one, which leaves registers for 32 queries.
// With kAnew a lane computes in each step where it is: more keys, or code for others, take the registers.
template <typename C, int kTeams, int kMembers, int kValueTiles, int kQueryTiles, int kKeyTiles = 2,
          bool kAnew = false>
struct Block {
  typedef typename C::Stored Stored;
  typedef typename Stored::Element T;
  static constant constexpr bool kWide = kQueryTiles > 2 || kValueTiles* kQueryTiles > 8;
  typedef typename StagedOf<T, kWide>::type Staged;
  static constant constexpr int kSimdgroups = kTeams * kMembers;
  static constant constexpr int kQueries = 8 * kQueryTiles;
  static constant constexpr int kKeysOfLane = kKeyTiles, kValuesOfLane = kValueTiles;
  static constant constexpr int kTeamTile = 8 * kKeyTiles * kMembers;  // keys
  static constant constexpr int kThreads = kSimdgroups * kSimdWidth;
  // How many runs of a key, and matrices of values, a lane loads before it uses the first. With more, it
  // would wait less often, but two tiles of queries leave no registers for more codes and scales.
  static constant constexpr bool kHasRoom =
      kKeyTiles <= 2 && (kQueryTiles == 1 || !(Stored::kQuantized || kWide));
  static constant constexpr int kRunsAtOnce = kHasRoom ? Stored::kRunsAtOnce : 1;
  static constant constexpr int kValuesAtOnce = kHasRoom ? 2 : 1;
  static constant constexpr int kProbabilities = kKeyTiles * kSimdgroups * kQueryTiles;
  static constant constexpr int kSumsOfLane = kValueTiles * kQueryTiles;  // pairs of numbers
  static constant constexpr int kOtherSums = (kTeams - 1) * kMembers * kSumsOfLane;

  // Threadgroup memory, after the queries.
  struct Shared {
    // Memory of a tile; at the end, the sums of all teams but the first.
    float2 exchange[(kProbabilities > kOtherSums ? kProbabilities : kOtherSums) * kSimdWidth];
    float2 highest[kSimdgroups][kQueries / 2];
    float2 sums[kSimdgroups][kQueries / 2];
    uint seen[kKeyTiles * kSimdgroups];  // a bit for each key that a query sees
  };

  // Where a thread is.
  struct Place {
    uint lane, simdgroup;
    uint team, member;  // its simdgroup is that member of that team
    MatrixPlace matrix;

    Place(uint lane_, uint simdgroup_)
        : lane(lane_),
          simdgroup(simdgroup_),
          team(kTeams == 1 ? 0 : simdgroup / kMembers),
          member(simdgroup - team * kMembers),
          matrix(lane) {}

    Place again() const {
      const uint index = anew(simdgroup * kSimdWidth + lane, lane);
      return Place(index % kSimdWidth, index / kSimdWidth);
    }

    uint first_of_team() const { return team * kMembers; }                  // of the simdgroups
    uint first_key() const { return 8 * kKeyTiles * member + matrix.row; }  // of the lane, in a tile
    uint first_value() const { return (member * 8 + matrix.row) * kValueTiles; }
  };

  // The keys that the block may see, and the positions of its first and last token.
  struct Range {
    uint begin, end;
    int lowest, highest;
  };

  // Bias of scores, a number for each key.
  struct Mask {
    device const uchar* values;
    ulong start;
  };

  struct Scores {
    float v[kKeyTiles][kQueryTiles][2];
  };
  // State of a lane's queries, over the keys so far: the highest score, sums of the exponentials of scores
  // less that, those of its own keys only, and of the values times these: the lane's elements of matrices,
  // which are made around each product. To Apple's compiler a matrix is a vector of 64 numbers: one that
  // lives on, and of which single elements are changed, may lie in memory.
  struct Sums {
    float highest[kQueryTiles][2], exponentials[kQueryTiles][2];
    float2 values[kValueTiles][kQueryTiles];
  };

  static void run(C keys, C values, device const T* q, device const uchar* mask, device const int* key_range,
                  device const uchar* sinks, device const T* gate, device T* output, device float* partials,
                  threadgroup Staged* staged, threadgroup Shared& shared, uint3 group, uint lane,
                  uint simdgroup, constant AttentionParams& params) {
    const Queries queries = queries_of_block<C::kSelects>(group, kQueries, params);
    if constexpr (C::kSelects) {
      device const int* indices =
          key_range + token_start(params.index, queries.batch, queries.only, queries.key_head);
      keys.select(indices, queries.only, params);
      values.select(indices, queries.only, params);
    }
    stage(staged, q, queries, simdgroup * kSimdWidth + lane, params);
    attend(keys, values, queries, mask, key_range, sinks, gate, output, partials, staged, shared, group, lane,
           simdgroup, params);
  }

  // With queries that are staged.
  static void attend(C keys, C values, Queries queries, device const uchar* mask_,
                     device const int* key_range, device const uchar* sinks, device const T* gate,
                     device T* output, device float* partials, threadgroup Staged* staged,
                     threadgroup Shared& shared, uint3 group, uint lane, uint simdgroup,
                     constant AttentionParams& params) {
    const Place place(lane, simdgroup);
    const Mask mask = {mask_, mask_start(queries, params)};
    const Range range = range_of(queries, key_range, group.x, params);
    int positions[kQueryTiles][2];
    Sums sums;
    start(sums, positions, queries, place, params);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_keys(sums, keys, values, mask, range, positions, queries, staged, shared, place, params);
    finish(sums, positions, queries, sinks, gate, output, partials, shared, group.x, place, params);
  }

  // The positions of the lane's queries, and sums of no key.
  static void start(thread Sums& sums, thread int (&positions)[kQueryTiles][2], Queries queries, Place place,
                    constant AttentionParams& params) {
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = query_of(t, e, place);
        positions[t][e] = queries.has(r) ? params.first_position + int(queries.token(r)) : kNoQuery;
        sums.highest[t][e] = kLowest;
        sums.exponentials[t][e] = 0.0f;
      }
      UNROLL for (int f = 0; f < kValueTiles; ++f) sums.values[f][t] = float2(0.0f);
    }
  }

  static Place in_step(Place outer) {
    if constexpr (kAnew) return outer.again();
    return outer;
  }

  // Adds the keys and values of a range. K and V are C, or KeyTiles and ValueTiles.
  template <typename K, typename V>
  static void add_keys(thread Sums& sums, K keys, V values, thread const Mask& mask,
                       thread const Range& range, thread const int (&positions)[kQueryTiles][2],
                       Queries queries, threadgroup const Staged* staged, threadgroup Shared& shared,
                       Place outer, constant AttentionParams& params) {
    const bool has_values = outer.member * 8 * kValueTiles < params.v.width;
    const uint begin = K::kTiled ? range.begin / kTeamTile * kTeamTile : range.begin;
    for (uint step = begin; step < range.end; step += kTeams * kTeamTile) {
      const Place place = in_step(outer);
      const uint tile = step + place.team * kTeamTile;
      const bool inside = all_see<K>(range, tile, params);
      Scores scores;
      ushort seen[kKeyTiles];
      const bool any = see(seen, keys, mask, inside, tile, place, range, positions, params);
      if constexpr (K::kTiled) {
        if (any) keys.template score<Block>(scores, staged, tile, place, params);
      } else {
        if (any) score(scores, keys, staged, tile, seen, place, params);
      }
      const Place same = place.again();
      weigh(scores, any, seen, keys, mask, inside, tile, range, positions, queries, shared, same, params);
      team_barrier();
      exponentiate(scores, sums, shared, same);
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        const uint bits = inside ? 0xffu : column_bits(seen[n]);
        if (same.lane == 0) shared.seen[same.simdgroup * kKeyTiles + n] = bits;
      }
      team_barrier();
      if constexpr (K::kTiled) {
        if (has_values) values.template add<Block>(sums, shared, tile, same, params);
      } else {
        if (has_values) add_values(sums, values, shared, tile, same);
      }
    }
  }

  // Gives the results of all keys that were added.
  static void finish(thread Sums& sums, thread const int (&positions)[kQueryTiles][2], Queries queries,
                     device const uchar* sinks, device const T* gate, device T* output,
                     device float* partials, threadgroup Shared& shared, uint chunk, Place place,
                     constant AttentionParams& params) {
    float2 totals[kQueryTiles];
    const Place same = place.again();
    if (!join_teams(sums, totals, shared, same)) return;
    // One branch for those without a gate.
    if (params.gate_width != 0 && params.chunks == 1)
      apply_gate(sums, gate, positions, queries, same, params);
    give_results(sums, totals, sinks, output, partials, positions, queries, chunk, same, params);
  }

  // Queries as fragments of 8 dimensions x 8 queries, in the order in which lanes hold the dimensions of a
  // key: fragment i of 32 dimensions has in row 2 c + e value (i, e) of the run of lane quarter c.
  static void stage(threadgroup Staged* target, device const T* q, Queries queries, uint thread_index,
                    constant AttentionParams& params) {
    const uint r = thread_index % kQueries;
    device const T* source = q + token_start(params.q, queries.batch, queries.token(r), queries.head(r));
    const uint octets = (params.k.width + kQueryColumns - 1) / kQueryColumns * (kQueryColumns / 8);
    for (uint octet = thread_index / kQueries; octet < octets; octet += kThreads / kQueries) {
      threadgroup Staged* fragments =
          target + ((octet / 4 * 4) * kQueryTiles + r / 8) * 64 + octet % 4 * 16 + r % 8;
      UNROLL for (int pair = 0; pair < 4; ++pair) {
        UNROLL for (int e = 0; e < 2; ++e) {
          const uint column = 8 * octet + Stored::value_of(pair, e);
          const bool exists = queries.has(r) && column < params.k.width;
          fragments[pair * kQueryTiles * 64 + e * 8] = exists ? Staged(source[column]) : Staged(0.0f);
        }
      }
    }
  }

  static ulong mask_start(Queries queries, constant AttentionParams& params) {
    return queries.batch * params.mask_batch_stride + queries.key_head * params.mask_head_stride;
  }

  static Range range_of(Queries queries, device const int* key_range, uint chunk,
                        constant AttentionParams& params) {
    const uint last = min(kQueries - 1u, queries.count - 1 - queries.first);
    const int lowest = params.first_position + int(queries.token(0));
    const int highest = params.first_position + int(queries.token(last));
    uint begin = params.first_key + chunk * params.chunk, end = min(begin + params.chunk, params.keys);
    if (!C::kSelects && params.mask_kind == MASK_NONE) {
      end = uint(clamp(highest + 1, int(begin), int(end)));
      if (params.window != 0) begin = uint(max(int(begin), lowest - int(params.window) + 1));
    }
    if (params.has_key_range != 0) {
      begin = uint(max(int(begin), key_range[2 * queries.batch]));
      end = uint(clamp(key_range[2 * queries.batch + 1], 0, int(end)));
    }
    return {begin, end, lowest, highest};
  }

  // Whether all queries see all keys of a team's tile.
  template <typename K>
  static bool all_see(thread const Range& range, uint tile, constant AttentionParams& params) {
    return !C::kSelects && params.mask_kind == MASK_NONE && tile + kTeamTile <= range.end &&
           (!K::kTiled || tile >= range.begin) && int(tile + kTeamTile) <= range.lowest + 1 &&
           (params.window == 0 || range.highest - int(tile) < int(params.window));
  }

  // Finds which of the lane's keys a query of the block sees. Returns: whether the simdgroup has any.
  template <typename K>
  static bool see(thread ushort* seen, K keys, thread const Mask& mask, bool inside, uint tile, Place place,
                  thread const Range& range, thread const int (&positions)[kQueryTiles][2],
                  constant AttentionParams& params) {
    bool any = inside;
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      seen[n] = 1;
      if (inside) continue;
      const uint key = tile + place.first_key() + 8 * n;
      seen[n] = 0;
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        UNROLL for (int e = 0; e < 2; ++e) {
          if (is_in<K>(range, key) && bias_of_key(keys, mask, positions[t][e], key, params) != -INFINITY)
            seen[n] = 1;
        }
      }
      seen[n] |= simd_shuffle_xor(seen[n], ushort(1));
      seen[n] |= simd_shuffle_xor(seen[n], ushort(8));
      any = ballot(seen[n] != 0) != 0 || any;
    }
    return any;
  }

  // The dot products of the simdgroup's keys and all queries.
  static void score(thread Scores& scores, C keys, threadgroup const Staged* staged, uint tile,
                    thread const ushort* seen, Place place, constant AttentionParams& params) {
    Matrix products[kKeyTiles][kQueryTiles];
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        products[n][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    const uint own = place.first_key();
    const uint own_query = place.matrix.row * 8 + 2 * place.matrix.quarter;  // in a matrix of them
    ROLLED for (uint first = 0; first < params.k.width; first += 32 * kRunsAtOnce) {
      typename Stored::template Run<8> runs[kRunsAtOnce][kKeyTiles];
      UNROLL for (int r = 0; r < kRunsAtOnce; ++r) {
        const uint column = first + 32 * r + 8 * place.matrix.quarter;
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          runs[r][n] = keys.template load<8>(tile, own + 8 * n, column, seen[n] != 0);
        }
      }
      UNROLL for (int i = 0; i < 4 * kRunsAtOnce; ++i) {
        Matrix fragments[kKeyTiles];
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          fragments[n] = matrix_of(Stored::template pair<8>(runs[i / 4][n], i % 4));
        }
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          const Matrix query = matrix_of(float2(*reinterpret_cast<threadgroup const vec<Staged, 2>*>(
              staged + own_query + first * (8 * kQueryTiles) + (i * kQueryTiles + t) * 64)));
          UNROLL for (int n = 0; n < kKeyTiles; ++n) {
            simdgroup_multiply_accumulate(products[n][t], fragments[n], query, products[n][t]);
          }
        }
      }
    }
    UNROLL for (int n = 0; n < kKeyTiles; ++n) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        UNROLL for (int e = 0; e < 2; ++e) scores.v[n][t][e] = products[n][t].thread_elements()[e];
      }
    }
  }

  // Makes products the scores of keys that are seen, and tells the team the highest of each query.
  template <typename K>
  static void weigh(thread Scores& scores, bool any, thread const ushort* seen, K keys,
                    thread const Mask& mask, bool inside, uint tile, thread const Range& range,
                    thread const int (&positions)[kQueryTiles][2], Queries queries,
                    threadgroup Shared& shared, Place place, constant AttentionParams& params) {
    threadgroup float2* highest = &shared.highest[place.simdgroup][place.matrix.quarter];
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      float most[2];
      UNROLL for (int e = 0; e < 2; ++e) {
        most[e] = -INFINITY;
        UNROLL for (int n = 0; n < kKeyTiles; ++n) {
          const uint key = tile + place.first_key() + 8 * n;
          float x = any ? scores.v[n][t][e] * params.scale : 0.0f;
          if (params.softcap != 0.0f) x = params.softcap * precise::tanh(x / params.softcap);
          if (!inside) {
            float bias = -INFINITY;
            if (is_in<K>(range, key) && seen[n] != 0)
              bias = bias_of_key(keys, mask, positions[t][e], key, params);
            x = bias == -INFINITY ? -INFINITY : x + bias;
          }
          scores.v[n][t][e] = x;
          most[e] = max(most[e], x);
        }
        most[e] = max_of_column(most[e]);
      }
      if (place.matrix.row == 0) highest[4 * t] = float2(most[0], most[1]);
    }
  }

  // Gives the team the exponentials of the scores, less the highest so far of each query.
  static void exponentiate(thread const Scores& scores, thread Sums& sums, threadgroup Shared& shared,
                           Place place) {
    // Places from which the others are constants away.
    threadgroup const float2* highest = &shared.highest[place.first_of_team()][place.matrix.quarter];
    threadgroup float2* own =
        shared.exchange + place.simdgroup * (kKeyTiles * kQueryTiles * kSimdWidth) + place.lane;
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      float2 most = float2(sums.highest[t][0], sums.highest[t][1]);
      UNROLL for (int m = 0; m < kMembers; ++m) most = max(most, highest[m * (kQueries / 2) + 4 * t]);
      raise(sums, t, most);
      UNROLL for (int n = 0; n < kKeyTiles; ++n) {
        float2 two;
        UNROLL for (int e = 0; e < 2; ++e) {
          two[e] = exponential(scores.v[n][t][e] - most[e]);
          sums.exponentials[t][e] += two[e];
        }
        own[(n * kQueryTiles + t) * kSimdWidth] = two;
      }
    }
  }

  // Value dimensions x keys times keys x queries, 8 keys at a time. A lane has kValueTiles dimensions of two
  // keys: an element of each in every fragment.
  static void add_values(thread Sums& sums, C values, threadgroup const Shared& shared, uint tile,
                         Place place) {
    const uint of_team = place.first_of_team() * kKeyTiles, quarter = place.matrix.quarter;
    uint own_place = of_team * kQueryTiles * kSimdWidth + place.lane;
    ROLLED for (uint first = 0; first < kKeyTiles * kMembers;
                first += kValuesAtOnce, own_place += kValuesAtOnce * kQueryTiles * kSimdWidth) {
      uint any = 0;
      UNROLL for (int n = 0; n < kValuesAtOnce; ++n) any |= shared.seen[of_team + first + n];
      if (any == 0) continue;
      typename Stored::template Run<kValueTiles> runs[kValuesAtOnce][2];
      UNROLL for (int n = 0; n < kValuesAtOnce; ++n) {
        const uint bits = shared.seen[of_team + first + n] >> (2 * quarter);
        UNROLL for (int e = 0; e < 2; ++e) {
          runs[n][e] = values.template load<kValueTiles>(tile, 8 * (first + n) + 2 * quarter + e,
                                                         place.first_value(), (bits >> e & 1) != 0);
        }
      }
      UNROLL for (int n = 0; n < kValuesAtOnce; ++n) {
        Matrix probabilities[kQueryTiles];
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          probabilities[t] = matrix_of(shared.exchange[own_place + (n * kQueryTiles + t) * kSimdWidth]);
        }
        UNROLL for (int i = 0; i < kValueTiles / 2; ++i) {
          const float2 of_key = Stored::template pair<kValueTiles>(runs[n][0], i);
          const float2 of_next = Stored::template pair<kValueTiles>(runs[n][1], i);
          UNROLL for (int e = 0; e < 2; ++e) {
            const Matrix matrix = matrix_of(float2(of_key[e], of_next[e]));
            const int f = Stored::value_of(i, e);
            UNROLL for (int t = 0; t < kQueryTiles; ++t) {
              Matrix sum = matrix_of(sums.values[f][t]);
              simdgroup_multiply_accumulate(sum, matrix, probabilities[t], sum);
              sums.values[f][t] = elements_of(sum);
            }
          }
        }
      }
    }
  }

  // Adds up the sums of all teams in the first. Returns: whether the lane is of that.
  static bool join_teams(thread Sums& sums, thread float2* totals, threadgroup Shared& shared, Place place) {
    if constexpr (kTeams > 1) raise_all(sums, shared, place);
    const uint quarter = place.matrix.quarter;
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      const float2 two =
          float2(sum_of_column(sums.exponentials[t][0]), sum_of_column(sums.exponentials[t][1]));
      if (place.matrix.row == 0) shared.sums[place.simdgroup][4 * t + quarter] = two;
    }
    if (kTeams > 1 && place.team != 0) give_sums(sums, shared, place);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kTeams > 1 && place.team != 0) return false;
    take_sums(sums, shared, place);
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      totals[t] = float2(0.0f);
      UNROLL for (int s = 0; s < kSimdgroups; ++s) totals[t] += shared.sums[s][4 * t + quarter];
    }
    return true;
  }

  static void apply_gate(thread Sums& sums, device const T* gate,
                         thread const int (&positions)[kQueryTiles][2], Queries queries, Place place,
                         constant AttentionParams& params) {
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = query_of(t, e, place);
        if (!has_query(r, positions[t][e], queries)) continue;
        const uint row = queries.row(r, token_of(positions[t][e], queries, params), params);
        UNROLL for (int f = 0; f < kValueTiles; ++f) {
          const uint column = place.first_value() + f;
          if (column < params.v.width) {
            sums.values[f][t][e] *= gate_factor(gate, row, column, params);
          }
        }
      }
    }
  }

  // Writes the results, or what attention_merge adds up where the keys are in several chunks.
  static void give_results(thread Sums& sums, thread const float2* totals, device const uchar* sinks,
                           device T* output, device float* partials,
                           thread const int (&positions)[kQueryTiles][2], Queries queries, uint chunk,
                           Place place, constant AttentionParams& params) {
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const uint r = query_of(t, e, place);
        if (!has_query(r, positions[t][e], queries)) continue;
        const uint token = token_of(positions[t][e], queries, params);
        const uint head = queries.head(r, token), row = queries.row(r, token, params);
        const Total own = {sums.highest[t][e], totals[t][e]};
        const bool merged = params.chunks > 1;
        const float factor = merged ? 1.0f : final_factor(own, sinks, head, params);
        device float* partial = merged ? partial_values(partials, chunk, row, params) : partials;
        UNROLL for (int f = 0; f < kValueTiles; ++f) {
          const uint column = place.first_value() + f;
          if (column >= params.v.width) continue;
          const float value = sums.values[f][t][e];
          if (merged) {
            partial[column] = value;
          } else {
            store_result(output, ulong(row) * params.v.width + column, value * factor, params);
          }
        }
        if (merged && place.member == 0 && place.matrix.row == 0) {
          partial_total(partials, chunk, row, params)[0] = own.highest;
          partial_total(partials, chunk, row, params)[1] = own.sum;
        }
      }
    }
  }

  // A lane's query e of query tile t, among those of the block.
  static uint query_of(int t, int e, Place place) { return 8 * t + 2 * place.matrix.quarter + e; }

  // Whether there is query r, and its token. Positions are kept for the loop over the keys, so that it keeps
  // nothing else for a query. Where queries are of one token, the loop needs no positions either.
  static bool has_query(uint r, int position, Queries queries) {
    return C::kSelects ? queries.has(r) : position != kNoQuery;
  }
  static uint token_of(int position, Queries queries, constant AttentionParams& params) {
    return C::kSelects ? queries.only : token_at(position, params);
  }
  static uint token_at(int position, constant AttentionParams& params) {
    return uint(position - params.first_position);
  }

  // Steps begin with the first key of a range, but for tiles, which are whole.
  template <typename K>
  static bool is_in(thread const Range& range, uint key) {
    return key < range.end && (!K::kTiled || key >= range.begin);
  }

  template <typename K>
  static float bias_of_key(K keys, thread const Mask& mask, int position, uint key,
                           constant AttentionParams& params) {
    if constexpr (C::kSelects) {
      return keys.has(key) ? 0.0f : -INFINITY;
    } else {
      return bias_of(mask.values, mask.start, position, key, params);
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
      const float factor = exponential(sums.highest[t][e] - most[e]);
      sums.highest[t][e] = most[e];
      sums.exponentials[t][e] *= factor;
      UNROLL for (int f = 0; f < kValueTiles; ++f) sums.values[f][t][e] *= factor;
    }
  }

  // To the highest score of all teams.
  static void raise_all(thread Sums& sums, threadgroup Shared& shared, Place place) {
    const uint quarter = place.matrix.quarter;
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      const float2 own = float2(sums.highest[t][0], sums.highest[t][1]);
      if (place.matrix.row == 0) shared.highest[place.simdgroup][4 * t + quarter] = own;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      float2 most = float2(kLowest);
      UNROLL for (int s = 0; s < kSimdgroups; s += kMembers) {
        most = max(most, shared.highest[s][4 * t + quarter]);
      }
      raise(sums, t, most);
    }
  }

  // The sums of the other teams go to the first, which adds them in ascending order.
  static void give_sums(thread Sums& sums, threadgroup Shared& shared, Place place) {
    threadgroup float2* target = shared.exchange +
                                 ((place.team - 1) * kMembers + place.member) * kSumsOfLane * kSimdWidth +
                                 place.lane;
    UNROLL for (int f = 0; f < kValueTiles; ++f) {
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        target[(f * kQueryTiles + t) * kSimdWidth] = sums.values[f][t];
      }
    }
  }
  static void take_sums(thread Sums& sums, threadgroup const Shared& shared, Place place) {
    UNROLL for (int team = 1; team < kTeams; ++team) {
      threadgroup const float2* source =
          shared.exchange + ((team - 1) * kMembers + place.member) * kSumsOfLane * kSimdWidth + place.lane;
      UNROLL for (int f = 0; f < kValueTiles; ++f) {
        UNROLL for (int t = 0; t < kQueryTiles; ++t) {
          sums.values[f][t] += source[(f * kQueryTiles + t) * kSimdWidth];
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
};

// Beside the keys and values there are their scales, or the keys and values of a tail.
template <typename C, int kTeams, int kMembers, int kValueTiles, int kQueryTiles, int kKeyTiles = 2>
[[kernel, max_total_threads_per_threadgroup(kTeams* kMembers* kSimdWidth)]] void attention_block(
    device const typename C::Stored::Element* q [[buffer(0)]], device const uchar* k [[buffer(1)]],
    device const uchar* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
    device const uchar* sinks [[buffer(4)]], device typename C::Stored::Element* output [[buffer(5)]],
    device float* partials [[buffer(6)]], device const typename C::Stored::Element* k_beside [[buffer(7)]],
    device const typename C::Stored::Element* k_biases [[buffer(8)]],
    device const typename C::Stored::Element* v_beside [[buffer(9)]],
    device const typename C::Stored::Element* v_biases [[buffer(10)]],
    device const int* key_range [[buffer(11)]], device const typename C::Stored::Element* gate [[buffer(12)]],
    constant AttentionParams& params [[buffer(13)]], threadgroup uchar* staged [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]], LANES) {
  typedef Block<C, kTeams, kMembers, kValueTiles, kQueryTiles, kKeyTiles> B;
  threadgroup typename B::Shared shared;
  const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
  const C keys(k, k_beside, k_biases, batch, key_head, params.k);
  const C values(v, v_beside, v_biases, batch, key_head, params.v);
  B::run(keys, values, q, mask, key_range, sinks, gate, output, partials,
         reinterpret_cast<threadgroup typename B::Staged*>(staged), shared, group, lane, simdgroup, params);
}

// The blocks of 8 and 16 queries for values of up to MOE_WIDTH elements.
#if MOE_WIDTH == 64
#define INSTANTIATE_ATTENTION(name, function, ...)            \
  INSTANTIATE(name "8_64", function<__VA_ARGS__, 4, 1, 8, 1>) \
  INSTANTIATE(name "16_64", function<__VA_ARGS__, 2, 2, 4, 2>)
#elif MOE_WIDTH == 128
#define INSTANTIATE_ATTENTION(name, function, ...)             \
  INSTANTIATE(name "8_128", function<__VA_ARGS__, 2, 2, 8, 1>) \
  INSTANTIATE(name "16_128", function<__VA_ARGS__, 1, 4, 4, 2>)
#elif MOE_WIDTH == 256
#define INSTANTIATE_ATTENTION(name, function, ...)             \
  INSTANTIATE(name "8_256", function<__VA_ARGS__, 1, 4, 8, 1>) \
  INSTANTIATE(name "16_256", function<__VA_ARGS__, 1, 8, 4, 2>)
#else
#define INSTANTIATE_ATTENTION(name, function, ...) \
  INSTANTIATE(name "8_512", function<__VA_ARGS__, 1, 8, 8, 1>)
#endif
