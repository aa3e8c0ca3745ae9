// Attention of one token whose queries and new key are normed and turned in the same launch, which writes the
// new key and value into their caches.
//
// Every threadgroup turns its own queries. Of a key head, only the threadgroup with the last keys writes and
// reads the new ones: a barrier is enough between.
#pragma once
#include "attention/block.h"
#include "attention/dense_cache.h"
#include "rope.h"
// Behind those.
#include "params/turned.h"

// Query r of a block among those that are staged.
template <typename B>
struct StagedQuery {
  threadgroup typename B::Staged* fragments;
  uint r;

  void put(uint column, float x) const {
    const uint octet = column / 8, tiles = B::kQueries / 8;
    const uint place = (octet / 4 * 4 + column % 8 / 2) * tiles + r / 8;
    fragments[place * 64 + octet % 4 * 16 + column % 2 * 8 + r % 8] = typename B::Staged(typename B::T(x));
  }
};

template <typename T, int kTeams, int kMembers, int kValueTiles, int kQueryTiles>
[[kernel, max_total_threads_per_threadgroup(kTeams* kMembers* kSimdWidth)]] void attention_turned(
    device const T* q [[buffer(0)]], device uchar* keys [[buffer(1)]], device uchar* values [[buffer(2)]],
    device const T* k [[buffer(3)]], device const T* v [[buffer(4)]], device const uchar* cos [[buffer(5)]],
    device const uchar* sin [[buffer(6)]], device const uchar* q_weight [[buffer(7)]],
    device const uchar* k_weight [[buffer(8)]], device const uchar* v_weight [[buffer(9)]],
    device const uchar* sinks [[buffer(10)]], device T* output [[buffer(11)]],
    device float* partials [[buffer(12)]], device const int* key_range [[buffer(13)]],
    device const T* gate [[buffer(14)]], constant TurnedParams& all [[buffer(15)]],
    threadgroup uchar* memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]], LANES) {
  typedef DenseCache<T> Cache;
  typedef Block<Cache, kTeams, kMembers, kValueTiles, kQueryTiles> B;
  threadgroup typename B::Shared shared;
  constant AttentionParams& params = all.attention;
  constant RopeParams& rope = all.rope;
  threadgroup typename B::Staged* staged = reinterpret_cast<threadgroup typename B::Staged*>(memory);
  const Queries queries = queries_of_block<false>(group, B::kQueries, params);
  const uint batch = queries.batch, key_head = queries.key_head;
  const ulong table_row = batch * rope.table_batch_stride;
  const uint columns = (rope.q.width + kQueryColumns - 1) / kQueryColumns * kQueryColumns;

  for (uint r = simdgroup; r < uint(B::kQueries); r += B::kSimdgroups) {
    const StagedQuery<B> row = {staged, r};
    if (queries.has(r)) {
      device const T* head = q + token_start(rope.q.input, batch, 0, queries.head(r));
      rope_head<T, 4, false>(head, q_weight, v_weight, cos, sin, table_row, row, rope.q, rope, lane);
    }
    for (uint column = lane + (queries.has(r) ? rope.q.width : 0); column < columns; column += kSimdWidth) {
      row.put(column, 0.0f);
    }
  }
  const Cache held_keys(keys, k, k, batch, key_head, params.k);
  const Cache held_values(values, v, v, batch, key_head, params.v);
  if (group.x + 1 == params.chunks) {
    const uint last = params.keys - 1;
    if (simdgroup == B::kSimdgroups - 1) {
      device T* target =
          reinterpret_cast<device T*>(keys) + token_start(params.k.values, batch, last, key_head);
      rope_head<T, 4, false>(k + token_start(rope.k.input, batch, 0, key_head), k_weight, v_weight, cos, sin,
                             table_row, target, rope.k, rope, lane);
    } else if (simdgroup == B::kSimdgroups - 2) {
      device T* target =
          reinterpret_cast<device T*>(values) + token_start(params.v.values, batch, last, key_head);
      rope_head<T, 4, false>(v + token_start(rope.v.input, batch, 0, key_head), v_weight, v_weight, cos, sin,
                             table_row, target, rope.v, rope, lane);
    }
    threadgroup_barrier(mem_flags::mem_device);
  }
  B::attend(held_keys, held_values, queries, keys, key_range, sinks, gate, output, partials, staged, shared,
            group, lane, simdgroup, params);
}
