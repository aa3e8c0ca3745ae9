// Sorting pairs p = t * K + k by expert. Ids outside [0, experts) fall into a last bucket of their own.
#pragma once
#include "common/simdgroups.h"
#include "geometry/bucket.h"
#include "params/bucket.h"

template <typename Id>
inline uint bucket_of(Id id, uint experts) {
  return id < 0 || id >= Id(experts) ? experts : uint(id);
}

inline uint lanes_before(uint lane) {
  return (1u << lane) - 1;
}

// The exclusive scan of `value` over the threadgroup, and its total. Ends with a barrier: `partials` can be
// used again.
inline uint threadgroup_scan(uint value, thread uint& total, threadgroup uint* partials, uint lane,
                             uint simdgroup, uint simdgroups) {
  const uint before_in_simdgroup = simd_prefix_exclusive_sum(value);
  if (lane == kSimdWidth - 1) partials[simdgroup] = before_in_simdgroup + value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint partial = lane < simdgroups ? partials[lane] : 0;
  total = simd_sum(partial);
  const uint before_simdgroup = simd_sum(lane < simdgroup ? partial : 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return before_simdgroup + before_in_simdgroup;
}

// The bucket that `tile` belongs to: the last one whose first tile does not come after it.
inline uint bucket_of_tile(uint tile, threadgroup const uint* first_tile, uint buckets) {
  uint low = 0;
  uint high = buckets;
  while (high - low > 1) {
    const uint middle = (low + high) / 2;
    if (first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// `starts` says where each bucket begins.
inline void write_tiles(device int4* tiles, device uint* grids, BucketParams params, uint tile_count,
                        threadgroup const uint* first_tile, threadgroup const uint* starts, uint thread_index,
                        uint threads) {
  const uint buckets = params.experts + 1;
  for (uint tile = thread_index; tile < tile_count; tile += threads) {
    const uint bucket = bucket_of_tile(tile, first_tile, buckets);
    const uint first = starts[bucket] + (tile - first_tile[bucket]) * params.tile_pairs;
    const uint end = bucket == params.experts ? params.pairs : starts[bucket + 1];
    tiles[tile] = int4(bucket == params.experts ? -1 : int(bucket), int(first),
                       int(min(end - first, params.tile_pairs)), 0);
  }
  if (thread_index == 0) {
    if (tile_count == 0) tiles[0] = int4(0, 0, 0, 0);
    const uint grid = max(tile_count, 1u);
    grids[0] = params.columns_a;
    grids[1] = grid;
    grids[2] = 1;
    grids[3] = params.columns_b;
    grids[4] = grid;
    grids[5] = 1;
  }
}

// Lanes with the same bucket find each other through words of threadgroup memory: a bucket selects a word by
// its residue, and every lane sets its bit in the word of its bucket.

// The lanes of the simdgroup whose bucket equals this lane's, among those that are `valid`. The order in
// which lanes set their bits does not matter. Buckets that share a word are told apart by ballots over their
// upper bits.
inline uint lanes_with_same(uint bucket, bool valid, uint upper_digits, threadgroup uint* lane_sets,
                            uint lane) {
  threadgroup uint* own = lane_sets + bucket % kLaneSets;
  if (valid) {
    atomic_fetch_or_explicit(reinterpret_cast<threadgroup atomic_uint*>(own), 1u << lane,
                             memory_order_relaxed);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint same = valid ? *own : 0;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (valid && lane == ctz(same)) *own = 0;  // for the next call
  for (uint digit = 0; digit < upper_digits; ++digit) {
    const bool set = ((bucket / kLaneSets >> digit) & 1) != 0;
    const uint lanes = ballot(set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

// How many ids a lane loads before it uses the first one: 32 bytes of registers.
template <typename Id>
struct Ahead {
  static constant constexpr uint value = 32 / sizeof(Id);
};

template <typename Id>
struct Ids {
  Id v[Ahead<Id>::value];
};

// The ids that a simdgroup has loaded, from pair `first` on.
template <typename Id>
inline Ids<Id> load_ids(device const Id* ids, uint first, uint end, uint lane) {
  Ids<Id> loaded;
  UNROLL for (uint i = 0; i < Ahead<Id>::value; ++i) {
    if (first + i * kSimdWidth + lane < end) loaded.v[i] = ids[first + i * kSimdWidth + lane];
  }
  return loaded;
}

// Adds them to `counters`. Counters are integers: the result does not depend on the order of the atomics.
template <typename Id>
inline void count_ids(Ids<Id> loaded, uint first, uint end, uint experts, threadgroup uint* counters,
                      uint lane) {
  UNROLL for (uint i = 0; i < Ahead<Id>::value; ++i) {
    if (first + i * kSimdWidth + lane < end) {
      threadgroup uint* counter = counters + bucket_of(loaded.v[i], experts);
      atomic_fetch_add_explicit(reinterpret_cast<threadgroup atomic_uint*>(counter), 1u,
                                memory_order_relaxed);
    }
  }
}

// A stable counting sort. Every threadgroup counts all pairs, those before its own run, those behind it, and
// those of its own run by chunk, so that it knows where its pairs go without waiting for another threadgroup.
// This takes one dispatch and spreads the scattered writes, which would dominate in a single threadgroup,
// over the GPU. Within a run, a simdgroup owns a chunk and a row of counters that become the places of its
// next pairs. threadgroup(0): before[buckets], behind[buckets] and later first_tile,
// counters[chunks][buckets], lane_sets[chunks][kLaneSets].
template <typename Id>
[[kernel, max_total_threads_per_threadgroup(kBucketThreads)]] void bucket_pairs(
    device const Id* ids [[buffer(0)]], device int* pair_order [[buffer(1)]],
    device int* offsets [[buffer(2)]], device int4* tiles [[buffer(3)]], device uint* grids [[buffer(4)]],
    constant BucketParams& arguments [[buffer(5)]], threadgroup uint* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint kGroupPairs = Ahead<Id>::value * kSimdWidth;
  const BucketParams params = arguments;
  threadgroup uint partials[kMaxSimdgroups];
  const uint buckets = params.experts + 1;
  const uint chunks = params.chunks;
  const uint threads = simdgroups * kSimdWidth;
  threadgroup uint* before = shared;
  threadgroup uint* behind = before + buckets;
  threadgroup uint* counters = behind + buckets;
  threadgroup uint* own_counters = counters + simdgroup * buckets;
  threadgroup uint* lane_sets = counters + chunks * buckets + simdgroup * kLaneSets;

  const uint run_begin = min(group * chunks * params.chunk, params.pairs);
  const uint run_end = min(run_begin + chunks * params.chunk, params.pairs);
  const uint begin = simdgroup < chunks ? min(run_begin + simdgroup * params.chunk, run_end) : run_end;
  const uint end = min(begin + params.chunk, run_end);
  Ids<Id> own = load_ids(ids, begin, end, lane);

  for (uint i = thread_index; i < 2 * buckets + chunks * (buckets + kLaneSets); i += threads) shared[i] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (begin < end) count_ids(own, begin, end, params.experts, own_counters, lane);
  for (uint first = begin + kGroupPairs; first < end; first += kGroupPairs) {
    count_ids(load_ids(ids, first, end, lane), first, end, params.experts, own_counters, lane);
  }
  for (uint first = simdgroup * kGroupPairs; first < run_begin; first += simdgroups * kGroupPairs) {
    count_ids(load_ids(ids, first, run_begin, lane), first, run_begin, params.experts, before, lane);
  }
  for (uint first = run_end + simdgroup * kGroupPairs; first < params.pairs;
       first += simdgroups * kGroupPairs) {
    count_ids(load_ids(ids, first, params.pairs, lane), first, params.pairs, params.experts, behind, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  uint pairs_before = 0;
  uint tiles_before = 0;
  for (uint first = 0; first < buckets; first += threads) {
    const uint bucket = first + thread_index;
    uint count = 0;
    if (bucket < buckets) {
      count = before[bucket] + behind[bucket];
      for (uint s = 0; s < chunks; ++s) count += counters[s * buckets + bucket];
    }
    uint pairs_here;
    const uint start =
        pairs_before + threadgroup_scan(count, pairs_here, partials, lane, simdgroup, simdgroups);
    pairs_before += pairs_here;
    if (bucket < buckets) {
      if (group == 0) offsets[bucket] = int(start);
      uint place = start + before[bucket];
      for (uint s = 0; s < chunks; ++s) {
        const uint in_chunk = counters[s * buckets + bucket];
        counters[s * buckets + bucket] = place;
        place += in_chunk;
      }
    }
    if (params.tile_pairs != 0) {
      const bool tiled = bucket < params.experts || (bucket == params.experts && params.sentinel_tiles != 0);
      const uint bucket_tiles = tiled ? (count + params.tile_pairs - 1) / params.tile_pairs : 0;
      uint tiles_here;
      const uint tile =
          tiles_before + threadgroup_scan(bucket_tiles, tiles_here, partials, lane, simdgroup, simdgroups);
      tiles_before += tiles_here;
      if (bucket < buckets) behind[bucket] = tile;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (group == 0 && params.tile_pairs != 0) {
    // The first run has no pairs before it: its first row of counters still says where the buckets begin.
    write_tiles(tiles, grids, params, tiles_before, behind, counters, thread_index, threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (uint first = begin; first < end; first += kGroupPairs) {
    if (first != begin) own = load_ids(ids, first, end, lane);
    UNROLL for (uint i = 0; i < Ahead<Id>::value; ++i) {
      const uint pair = first + i * kSimdWidth + lane;
      if (first + i * kSimdWidth < end) {
        const bool valid = pair < end;
        const uint bucket = valid ? bucket_of(own.v[i], params.experts) : 0;
        const uint same = lanes_with_same(bucket, valid, params.upper_digits, lane_sets, lane);
        const uint rank = popcount(same & lanes_before(lane));
        uint place = 0;
        if (valid && rank == 0) {
          place = own_counters[bucket];
          own_counters[bucket] = place + popcount(same);
        }
        // The next ids may touch counter and set from another lane.
        simdgroup_barrier(mem_flags::mem_threadgroup);
        place = simd_shuffle(place, ushort(valid ? ctz(same) : lane)) + rank;
        if (valid) pair_order[place] = int(pair);
      }
    }
  }
}

constant constexpr uint kIdsPairsPerTile = 32;

// Threadgroup e lists the pairs of expert e. One more threadgroup counts the pairs of all experts: the grids
// need the largest count.
template <typename Id>
[[kernel, max_total_threads_per_threadgroup(kBucketThreads)]] void ids_by_expert(
    device const Id* ids [[buffer(0)]], device int* tpe [[buffer(1)]], device int* lists [[buffer(2)]],
    device int* gate_up_args [[buffer(3)]], device int* down_args [[buffer(4)]],
    constant IdsTpeParams& arguments [[buffer(5)]], threadgroup uint* counts [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], LANES,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const IdsTpeParams params = arguments;
  threadgroup uint partials[kMaxSimdgroups];
  const uint threads = simdgroups * kSimdWidth;
  if (group == params.experts) {
    for (uint e = thread_index; e < params.experts + 1; e += threads) counts[e] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup atomic_uint* atomic_counts = reinterpret_cast<threadgroup atomic_uint*>(counts);
    for (uint pair = thread_index; pair < params.pairs; pair += threads) {
      atomic_fetch_add_explicit(&atomic_counts[bucket_of(ids[pair], params.experts)], 1u,
                                memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint most = 0;
    for (uint e = thread_index; e < params.experts; e += threads) most = max(most, counts[e]);
    most = simd_max(most);
    if (lane == 0) partials[simdgroup] = most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    most = simd_max(lane < simdgroups ? partials[lane] : 0);
    if (thread_index == 0) {
      const int tiles = int(max((most + kIdsPairsPerTile - 1) / kIdsPairsPerTile, 1u));
      gate_up_args[0] = tiles;
      gate_up_args[1] = int(params.gate_up_tiles);
      gate_up_args[2] = int(params.experts);
      down_args[0] = tiles;
      down_args[1] = int(params.down_tiles);
      down_args[2] = int(params.experts);
    }
    return;
  }

  const uint chunk = (params.pairs + threads - 1) / threads * kSimdWidth;
  const uint begin = simdgroup * chunk;
  const uint end = min(begin + chunk, params.pairs);
  uint matches = 0;
  for (uint pair = begin + lane; pair < end; pair += kSimdWidth) {
    matches += bucket_of(ids[pair], params.experts) == group ? 1 : 0;
  }
  uint total;
  uint place = threadgroup_scan(matches, total, partials, lane, simdgroup, simdgroups);
  place = simd_shuffle(place, ushort(0));  // where this simdgroup's run begins

  device int* list = lists + ulong(group) * params.pairs;
  for (uint first = begin; first < end; first += kSimdWidth) {
    const uint pair = first + lane;
    const bool match = pair < end && bucket_of(ids[pair], params.experts) == group;
    const uint lanes = ballot(match);
    if (match) list[place + popcount(lanes & lanes_before(lane))] = int(pair);
    place += popcount(lanes);
  }
  for (uint i = total + thread_index; i < params.pairs; i += threads) list[i] = -1;
  if (thread_index == 0) tpe[group] = int(total);
}
