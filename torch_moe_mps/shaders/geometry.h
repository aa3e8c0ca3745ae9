// How kernels share out their work, as far as the host sizes grids and threadgroup memory by it.
#pragma once
#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define GEOMETRY constant constexpr uint
#else
#include <cstdint>
#define GEOMETRY inline constexpr int64_t
#endif

GEOMETRY kSimdWidth = 32;

// Norms: the most threads of a row. More would leave a thread too few registers on M1.
GEOMETRY kNormThreads = 512;

// Rotary position embedding: heads of a threadgroup, a simdgroup each.
GEOMETRY kRopeHeads = 4;
GEOMETRY kTableThreads = 64;

// Attention. A threadgroup takes some queries of a key head and a chunk of the keys; its simdgroups take
// tiles of kSimdWidth keys by turns.
GEOMETRY kAttentionSimdgroups = 4;
GEOMETRY kAttentionQueries = 2;  // four would take more registers than M1 has
GEOMETRY kHeadElements = 8;      // of a lane

// Linear attention
GEOMETRY kConvThreads = 64;
GEOMETRY kDeltaRows = 16;        // of a head's state, of a thread
GEOMETRY kDeltaSimdgroups = 16;  // at most

// Combine
GEOMETRY kSiluThreads = 128;
GEOMETRY kSumNormThreads = 384;

// Routing
GEOMETRY kLaneSets = 64;  // of bucket_pairs
GEOMETRY kBucketThreads = 1024;
GEOMETRY kGateSimdgroups = 4;
GEOMETRY kGateSingleExperts = 2;  // of a simdgroup, for few tokens: many threadgroups
GEOMETRY kGateExperts = 4;
GEOMETRY kGateTokens = 4;
GEOMETRY kMaxSlots = 64;             // experts of a token
GEOMETRY kThreadgroupFloats = 8192;  // of threadgroup memory

// Experts. The threads that the matmuls' kernels declare, more than they are launched with: as few as let a
// thread have 128 registers on M1.
GEOMETRY kMatmulBound = 384;

// Few tokens: dot products
GEOMETRY kRowGroupsOfSimdgroup = 4;  // groups of lanes that each have rows of their own
GEOMETRY kSingleRows = 2;            // of a lane
GEOMETRY kSingleSimdgroups = 2;      // of a threadgroup: many threadgroups
GEOMETRY kFewRows = 4;               // of a lane, for several tokens
GEOMETRY kFewDownRows = 8;           // of a threadgroup, for several tokens
GEOMETRY kFewSimdgroups = 4;
GEOMETRY kDownSimdgroups = 8;
GEOMETRY kMaxFewPairs = 512;      // their terms lie in threadgroup memory
GEOMETRY kColumnSimdgroups = 16;  // transposed weights

GEOMETRY kEmbeddingThreads = 128;

// Many tokens: matrix products
GEOMETRY kTilePairs = 32;
GEOMETRY kGemmRows = 128;  // of a threadgroup
GEOMETRY kGemmSimdgroups = 4;
GEOMETRY kCombineColumns = 4;  // of a thread
