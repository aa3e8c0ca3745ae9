// Sorting pairs by expert
#pragma once

struct BucketParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t chunks;          // runs of consecutive pairs, one a simdgroup
  uint32_t chunk;           // pairs of a run, a multiple of 32
  uint32_t upper_digits;    // binary digits of the number of experts above those that select a lane set
  uint32_t tile_pairs;      // 0: no tile list
  uint32_t sentinel_tiles;  // also tiles of expert -1 for the sentinels
  uint32_t columns_a;       // threadgroups across the columns of the two matmuls that use the tiles
  uint32_t columns_b;
};

struct IdsTpeParams {
  uint32_t pairs;
  uint32_t experts;
  uint32_t gate_up_tiles;
  uint32_t down_tiles;
};
