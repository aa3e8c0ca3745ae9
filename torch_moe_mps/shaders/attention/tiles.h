// Attention to a cache whose first 128 tokens and last tiles are dense, and whose other tiles are in codes of
// 4 or 2 bits.
//
// The numbers of a tile leave the loops over its codes: scales and zero points of keys go into the queries
// once a tile, factors of tokens into the probabilities, and scales and zero points of values into the sums
// of a tile. A code c of b bits is read as 1 + c / 2^b, which its bits are below the exponent of 1: that
// takes no conversion from integers.
#pragma once
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "geometry/tiles.h"
#include "params/tiles.h"

// Bits of the codes of keys and values.
template <int kOfKeys, int kOfValues>
struct TileBits {
  static constant constexpr int kKeys = kOfKeys, kValues = kOfValues;
};

// Codes i and i + (those of 16 bits) of a word.
template <int kBits>
inline float2 pair_of_codes(uint word, int i) {
  const int up = 10 - kBits * (i + 1);  // to the upper bits of the mantissas of two halves
  const uint moved = up >= 0 ? word << max(up, 0) : word >> max(-up, 0);
  const uint mask = ((1u << kBits) - 1) << (10 - kBits);
  return float2(as_type<half2>((moved & (mask * 0x10001u)) | 0x3c003c00u));
}

// The tiles of a head.
template <typename T>
struct Tiles {
  device const uint* start;
  ulong stride;  // words of a tile
  uint width, numbers;
  bool has_factors;

  Tiles(device const uint* tiles, uint batch, uint head, constant TileParams& params)
      : start(tiles + token_start(params.tiles, batch, 0, head)),
        stride(params.tiles.token),
        width(params.width),
        numbers(params.numbers),
        has_factors(params.has_factors != 0) {}

  device const uint* tile(uint token) const { return start + ulong(token / kTileTokens) * stride; }
  // The scales of a tile, then its zero points and factors.
  device const T* scales(device const uint* tile) const {
    return reinterpret_cast<device const T*>(tile + numbers);
  }
};

// Keys as Block reads them. A lane takes 16 elements of 8 keys at once: run c of 64 columns, which is in rows
// 2 c and 2 c + 1 of eight fragments of the queries.
template <typename T, int kBits>
struct KeyTiles {
  static constant constexpr bool kSelects = false;
  static constant constexpr bool kTiled = true;
  static constant constexpr int kRun = 16;
  static constant constexpr int kFragments = 8;
  static constant constexpr int kWords = kRun * kBits / 32;
  static constant constexpr int kHalf = 16 / kBits;  // codes of 16 bits

  Tiles<T> tiles;

  // Column `piece` of a row, less that of the first.
  static uint column_of(int piece) { return piece / kHalf * 2 * kHalf + piece % kHalf; }
  static uint first_column(uint row) { return row / 2 * kRun + row % 2 * kHalf; }

  // Stages queries in the order in which lanes hold the columns of a key.
  template <typename B>
  static void stage(threadgroup typename B::Staged* target, device const T* q, Queries queries,
                    uint thread_index, constant AttentionParams& params) {
    const uint r = thread_index % B::kQueries;
    device const T* source = q + token_start(params.q, queries.batch, queries.token(r), queries.head(r));
    const uint rows = (params.k.width + kQueryColumns - 1) / kQueryColumns * 8;
    for (uint row = thread_index / B::kQueries; row < rows; row += B::kThreads / B::kQueries) {
      const uint first = row / 8 * kQueryColumns + first_column(row % 8);
      UNROLL for (int i = 0; i < kFragments; ++i) {
        const uint column = first + column_of(i);
        const bool exists = queries.has(r) && column < params.k.width;
        target[((row / 8 * kFragments + i) * (B::kQueries / 8) + r / 8) * 64 + row % 8 * 8 + r % 8] =
            exists ? typename B::Staged(source[column]) : typename B::Staged(0.0f);
      }
    }
  }

  // Four neighbouring numbers of a tile; zeros past the end of the head.
  static float4 four(device const T* numbers, bool exists) {
    return exists ? float4(*reinterpret_cast<device const vec<T, 4>*>(numbers)) : float4(0.0f);
  }

  // The dot products of the simdgroup's keys and all queries.
  template <typename B>
  void score(thread typename B::Scores& scores, threadgroup const typename B::Staged* staged, uint token,
             typename B::Place place, constant AttentionParams&) const {
    constexpr int kKeys = B::kKeysOfLane, kQueryTiles = B::kQueries / 8;
    device const uint* tile = tiles.tile(token);
    const uint row = place.matrix.row, row_words = tiles.width * kBits / 32;
    const uint own_query = row * 8 + 2 * place.matrix.quarter;
    const uint own_codes =
        (token % kTileTokens + place.first_key()) * row_words + place.matrix.quarter * kWords;
    device const T* numbers = tiles.scales(tile) + first_column(row);
    Matrix products[kKeys][kQueryTiles];
    float2 zeros[kQueryTiles];  // of the row's columns, times the queries
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      zeros[t] = float2(0.0f);
      UNROLL for (int n = 0; n < kKeys; ++n) products[n][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    ROLLED for (uint first = 0; first < tiles.width; first += kQueryColumns) {
      const bool exists = first + kRun * place.matrix.quarter < tiles.width;
      const bool row_exists = first + kRun * (row / 2) < tiles.width;
      const uint codes = own_codes + first * kBits / 32;
      Words<kWords> runs[kKeys];
      UNROLL for (int n = 0; n < kKeys; ++n) {
        runs[n] = Words<kWords>();
        if (exists) runs[n] = load_words<kWords>(tile + (codes + n * 8 * row_words));
      }
      UNROLL for (int part = 0; part < kFragments / 4; ++part) {
        device const T* source = numbers + first + column_of(4 * part);
        const float4 scales = four(source, row_exists) * float(1 << kBits);
        const float4 biases = four(source + tiles.width, row_exists) - scales;
        UNROLL for (int i = 0; i < 4; ++i) {
          const int piece = 4 * part + i;
          Matrix keys[kKeys];
          UNROLL for (int n = 0; n < kKeys; ++n) {
            keys[n] = matrix_of(pair_of_codes<kBits>(runs[n].v[piece / kHalf], piece % kHalf));
          }
          UNROLL for (int t = 0; t < kQueryTiles; ++t) {
            const float2 two = float2(*reinterpret_cast<threadgroup const vec<typename B::Staged, 2>*>(
                staged + own_query + first * (8 * kQueryTiles) + (piece * kQueryTiles + t) * 64));
            zeros[t] = fma(two, float2(biases[i]), zeros[t]);
            const Matrix query = matrix_of(two * scales[i]);
            UNROLL for (int n = 0; n < kKeys; ++n) {
              simdgroup_multiply_accumulate(products[n][t], keys[n], query, products[n][t]);
            }
          }
        }
      }
    }
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const float zero = sum_of_column(zeros[t][e]);
        UNROLL for (int n = 0; n < kKeys; ++n) {
          scores.v[n][t][e] = products[n][t].thread_elements()[e] + zero;
        }
      }
    }
  }
};

// Values as Block reads them.
template <typename T, int kBits>
struct ValueTiles {
  Tiles<T> tiles;

  // N neighbouring codes, the first half of them in the lower 16 bits.
  template <int N>
  static uint load(device const uchar* source) {
    if constexpr (N * kBits == 32) {
      return *reinterpret_cast<device const uint*>(source);
    } else if constexpr (N * kBits == 16) {
      const uint both = *reinterpret_cast<device const ushort*>(source);
      return (both & 0xffu) | (both & 0xff00u) << 8;
    } else {
      const uint both = *source;
      return (both & 0xfu) | (both & 0xf0u) << 12;
    }
  }

  // Value dimensions x keys times keys x queries, 8 keys at a time, as Block::add_values. The sums of the
  // tile are those of probabilities times codes until its numbers are known to be wanted.
  template <typename B>
  void add(thread typename B::Sums& sums, threadgroup const typename B::Shared& shared, uint token,
           typename B::Place place, constant AttentionParams& params) const {
    constexpr int kQueryTiles = B::kQueries / 8, kValueTiles = B::kValuesOfLane;
    const uint quarter = place.matrix.quarter, column = place.first_value();
    const bool exists = column < params.v.width;
    device const uint* tile = tiles.tile(token);
    device const T* numbers = tiles.scales(tile);
    const uint first = token % kTileTokens;
    device const T* factors = numbers + 2 * tiles.width + first + place.matrix.row;
    const uint row_bytes = tiles.width * kBits / 8;
    device const uchar* codes =
        reinterpret_cast<device const uchar*>(tile) + (first + 2 * quarter) * row_bytes + column * kBits / 8;
    threadgroup const float2* probabilities =
        shared.exchange + place.first_of_team() * (B::kKeysOfLane * kQueryTiles * kSimdWidth) + place.lane;
    threadgroup const uint* seen = shared.seen + place.first_of_team() * B::kKeysOfLane;
    float2 of_tile[kValueTiles][kQueryTiles], weights[kQueryTiles];
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      weights[t] = float2(0.0f);
      UNROLL for (int f = 0; f < kValueTiles; ++f) of_tile[f][t] = float2(0.0f);
    }
    uint any = 0;
    ROLLED for (uint n = 0; n < B::kTeamTile / 8; ++n) {
      if (seen[n] == 0) continue;
      any = 1;
      uint runs[2];
      UNROLL for (int e = 0; e < 2; ++e) {
        runs[e] = exists ? load<kValueTiles>(codes + (8 * n + e) * row_bytes) : 0;
      }
      const float factor = tiles.has_factors ? float(factors[8 * n]) : 1.0f;
      Matrix of_keys[kQueryTiles];
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        const float2 two = probabilities[(n * kQueryTiles + t) * kSimdWidth] * factor;
        weights[t] += two;
        of_keys[t] = matrix_of(two);
      }
      UNROLL for (int i = 0; i < kValueTiles / 2; ++i) {
        const float2 of_key = pair_of_codes<kBits>(runs[0], i), of_next = pair_of_codes<kBits>(runs[1], i);
        UNROLL for (int e = 0; e < 2; ++e) {
          const Matrix matrix = matrix_of(float2(of_key[e], of_next[e]));
          const int f = i + e * kValueTiles / 2;
          UNROLL for (int t = 0; t < kQueryTiles; ++t) {
            Matrix sum = matrix_of(of_tile[f][t]);
            simdgroup_multiply_accumulate(sum, matrix, of_keys[t], sum);
            of_tile[f][t] = elements_of(sum);
          }
        }
      }
    }
    if (any == 0) return;
    UNROLL for (int t = 0; t < kQueryTiles; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) weights[t][e] = sum_of_column(weights[t][e]);
    }
    if (!exists) return;
    UNROLL for (int f = 0; f < kValueTiles; ++f) {
      const float scale = float(numbers[column + f]) * float(1 << kBits);
      const float bias = float(numbers[tiles.width + column + f]) - scale;
      UNROLL for (int t = 0; t < kQueryTiles; ++t) {
        sums.values[f][t] += fma(of_tile[f][t], float2(scale), weights[t] * bias);
      }
    }
  }
};

// Queries of a threadgroup, of tokens of one tile: these see the same keys in codes.
inline Queries queries_of_tile(uint3 group, uint size, uint tile, constant TiledParams& all) {
  constant AttentionParams& params = all.attention;
  const uint group_heads = params.heads / params.key_heads;
  const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
  const uint first = max(tile * kTileTokens, params.position) - params.position;
  const uint end = min((tile + 1) * kTileTokens - params.position, params.tokens);
  const uint block = (group.y + all.first_block) % all.tile_blocks;
  return {
      batch, key_head, group_heads, first * group_heads + block * size, end * group_heads, params.tokens == 1,
      0};
}

template <typename T, typename Bits, int kTeams, int kMembers, int kValueTiles, int kQueryTiles,
          int kKeyTiles>
[[kernel, max_total_threads_per_threadgroup(kTeams* kMembers* kSimdWidth)]] void attention_tiles(
    device const T* q [[buffer(0)]], device const uchar* k [[buffer(1)]], device const uchar* v [[buffer(2)]],
    device const uint* k_tiles [[buffer(3)]], device const uint* v_tiles [[buffer(4)]],
    device const uchar* mask_ [[buffer(5)]], device const uchar* sinks [[buffer(6)]],
    device T* output [[buffer(7)]], device float* partials [[buffer(8)]],
    device const int* key_range [[buffer(9)]], device const T* gate [[buffer(10)]],
    constant TiledParams& all [[buffer(11)]], threadgroup uchar* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]], LANES) {
  typedef DenseCache<T> Dense;
  typedef KeyTiles<T, Bits::kKeys> Keys;
  typedef ValueTiles<T, Bits::kValues> Values;
  typedef Block<Dense, kTeams, kMembers, kValueTiles, kQueryTiles, kKeyTiles, true> B;
  threadgroup typename B::Shared shared;
  constant AttentionParams& params = all.attention;
  threadgroup typename B::Staged* staged = reinterpret_cast<threadgroup typename B::Staged*>(memory);
  const uint own = params.position / kTileTokens + (group.y + all.first_block) / all.tile_blocks;
  const Queries queries = queries_of_tile(group, B::kQueries, own, all);
  if (queries.first >= queries.count) return;
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const typename B::Place place(lane, simdgroup);
  const typename B::Mask mask = {mask_, B::mask_start(queries, params)};
  const typename B::Range range = B::range_of(queries, key_range, group.x, params);
  const uint end = min(range.end, (own + 1) * kTileTokens);
  int positions[kQueryTiles][2];
  typename B::Sums sums;
  B::start(sums, positions, queries, place, params);

  const uint first_own = max(own, 1u) * kTileTokens;
  B::stage(staged, q, queries, thread_index, params);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ROLLED for (uint part = 0; part < 2; ++part) {
    const uint left_out = part == 0 ? 0 : all.left_out;
    Dense keys(k, q, q, queries.batch, queries.key_head, params.k);
    Dense values(v, q, q, queries.batch, queries.key_head, params.v);
    keys.start -= ulong(left_out) * keys.stride;
    values.start -= ulong(left_out) * values.stride;
    typename B::Range dense = range;
    dense.begin = part == 0 ? range.begin : max(range.begin, first_own);
    dense.end = part == 0 ? min(end, kTileTokens) : end;
    B::add_keys(sums, keys, values, mask, dense, positions, queries, staged, shared, place, params);
  }
  typename B::Range tiled = range;
  tiled.begin = max(range.begin, kTileTokens);
  tiled.end = min(end, own * kTileTokens);
  if (tiled.begin < tiled.end) {
    const Keys keys = {Tiles<T>(k_tiles, queries.batch, queries.key_head, all.k)};
    const Values values = {Tiles<T>(v_tiles, queries.batch, queries.key_head, all.v)};
    Keys::template stage<B>(staged, q, queries, thread_index, params);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    B::add_keys(sums, keys, values, mask, tiled, positions, queries, staged, shared, place, params);
  }
  B::finish(sums, positions, queries, sinks, gate, output, partials, shared, group.x, place, params);
}

// The blocks of 8 and 16 queries for values of up to MOE_WIDTH elements.
#if MOE_WIDTH == 64
#define INSTANTIATE_TILES(...)                                          \
  INSTANTIATE("tiles8_64", attention_tiles<__VA_ARGS__, 2, 2, 4, 1, 4>) \
  INSTANTIATE("tiles16_64", attention_tiles<__VA_ARGS__, 2, 2, 4, 2, 2>)
#elif MOE_WIDTH == 128
#define INSTANTIATE_TILES(...)                                           \
  INSTANTIATE("tiles8_128", attention_tiles<__VA_ARGS__, 2, 2, 8, 1, 4>) \
  INSTANTIATE("tiles16_128", attention_tiles<__VA_ARGS__, 1, 4, 4, 2, 2>)
#elif MOE_WIDTH == 256
#define INSTANTIATE_TILES(...)                                           \
  INSTANTIATE("tiles8_256", attention_tiles<__VA_ARGS__, 1, 4, 8, 1, 2>) \
  INSTANTIATE("tiles16_256", attention_tiles<__VA_ARGS__, 1, 8, 4, 2, 2>)
#else
#define INSTANTIATE_TILES(...) INSTANTIATE("tiles8_512", attention_tiles<__VA_ARGS__, 1, 8, 8, 1, 2>)
#endif
