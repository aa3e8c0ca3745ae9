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

// Combine
GEOMETRY kSiluThreads = 128;
GEOMETRY kNormThreads = 512;

// Routing
GEOMETRY kLaneSets = 64;  // of bucket_pairs
GEOMETRY kBucketThreads = 1024;
GEOMETRY kMaxSlots = 64;             // experts of a token
GEOMETRY kThreadgroupFloats = 8192;  // of threadgroup memory

// Experts, few tokens: dot products
GEOMETRY kRowGroupsOfSimdgroup = 4;  // groups of lanes that each have rows of their own
GEOMETRY kSingleRows = 4;            // of a lane
GEOMETRY kFewRows = 4;               // of a lane, for several tokens
GEOMETRY kFewDownRows = 8;           // of a threadgroup, for several tokens
GEOMETRY kRowsSimdgroups = 8;        // of a threadgroup
GEOMETRY kRowsBound = 576;           // threads that the kernels declare, more than are launched: registers
GEOMETRY kFewBound = 512;
GEOMETRY kMaxFewPairs = 512;      // their terms lie in threadgroup memory
GEOMETRY kColumnSimdgroups = 16;  // transposed weights

// Experts, many tokens: matrix products
GEOMETRY kTilePairs = 32;
GEOMETRY kGemmRows = 128;  // of a threadgroup
GEOMETRY kGemmSimdgroups = 4;
GEOMETRY kGemmBound = 448;
GEOMETRY kCombineColumns = 4;  // of a thread
