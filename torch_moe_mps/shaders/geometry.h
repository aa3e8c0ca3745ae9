// How many rows, tokens and threads a threadgroup takes: the host sizes grids and threadgroup memory by these
// numbers, the kernels index by them. Numbers without a comment are untuned.
#pragma once
#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define GEOMETRY constant constexpr uint
#else
#include <cstdint>
#define GEOMETRY inline constexpr int64_t
#endif

GEOMETRY kSimdWidth = 32;

// Norms: the most threads that work on a row. With more, a thread has too few registers on M1.
GEOMETRY kNormThreads = 512;

// Rotary position embedding: a threadgroup takes this many heads, each simdgroup one.
GEOMETRY kRopeHeads = 4;
GEOMETRY kTableThreads = 64;

// Attention: the sum over chunks. attention.metal has the sizes of the other kernels.
GEOMETRY kQueryColumns = 64;  // queries in threadgroup memory are a multiple of this wide
GEOMETRY kMergeSimdgroups = 8;
GEOMETRY kMergeColumns = 4;  // columns of a thread
GEOMETRY kMergeChunks = 4;   // of a thread, that are loaded before any is used
GEOMETRY kCacheThreads = 128;

// Sparse attention: keys of a threadgroup, heads whose queries it holds at a time, and their widest
GEOMETRY kIndexKeys = 128;
GEOMETRY kIndexThreads = 64;
GEOMETRY kIndexHeads = 16;
GEOMETRY kIndexWidth = 256;
GEOMETRY kBlockHeads = 4;  // of which a simdgroup scores a block of keys at a time
GEOMETRY kIndexSimdgroups = kIndexThreads / 32;
GEOMETRY kSelectThreads = 1024;
GEOMETRY kSelectBins = 2048;

// Pooling: a thread takes two channels of an entry, MAX_POOLED_WIDTH of ops/pooling.py at most.
GEOMETRY kPoolThreads = 768;
GEOMETRY kPoolTokens = 16;  // of a window, at least, that a thread takes

// Linear attention
GEOMETRY kConvThreads = 64;
GEOMETRY kConvTokens = 8;       // of a thread, at least
GEOMETRY kScanRows = 16;        // rows of a head's state that a lane holds,
GEOMETRY kScanColumns = 2;      // of so many columns
GEOMETRY kScanSimdgroups = 16;  // the most that share a head, with a norm
GEOMETRY kSliceSimdgroups = 8;  // the most that share a part of a head, without one
GEOMETRY kScanTokens = 16;      // staged at a time for heads of up to 128
GEOMETRY kSelectiveThreads = 128;
GEOMETRY kSelectiveStates = 16;  // of a channel: MAX_STATES of ops/linear_attention.py
GEOMETRY kSelectiveTokens = 64;  // staged at a time
GEOMETRY kSelectiveUnroll = 4;   // loaded at a time

// Hyper-connections
GEOMETRY kMaxStreams = 4;  // MAX_STREAMS of ops/hyper_connection.py
GEOMETRY kMaxHyperRows = (2 + kMaxStreams) * kMaxStreams;
GEOMETRY kHyperThreads = 256;
GEOMETRY kHyperColumns = 128;  // of a threadgroup: four for each lane
GEOMETRY kHyperTokens = 8;     // that share the loads of weights

// Formulas of elements
GEOMETRY kPointwiseThreads = 64;

// Combine
GEOMETRY kSiluThreads = 128;
GEOMETRY kSumNormThreads = 384;

// Routing
GEOMETRY kLaneSets = 64;  // words in which the lanes of bucket_pairs find lanes with the same bucket
GEOMETRY kBucketThreads = 1024;
GEOMETRY kLogitsSimdgroups = 4;
GEOMETRY kLogitsFewExperts = 2;  // experts of a threadgroup for few tokens: fewer give more threadgroups
GEOMETRY kLogitsUnroll = 2;      // vectors of a row that a lane loads at a time
GEOMETRY kLogitsExperts = 4;
GEOMETRY kLogitsTokens = 4;
GEOMETRY kMaxSlots = 64;             // the most experts of a token: MAX_TOP_K of ops/_checks.py
GEOMETRY kThreadgroupFloats = 8192;  // what 32 KiB of threadgroup memory hold

// Experts. Kernels of the matmuls declare this many threads, although they are launched with fewer: with
// this bound, Apple's compiler gives a thread 128 registers on M1.
GEOMETRY kMatmulBound = 384;

// Few tokens: dot products
GEOMETRY kRowGroupsOfSimdgroup = 4;  // a simdgroup is 4 groups of 8 lanes; each group has its own rows
GEOMETRY kSingleRows = 2;            // rows of a group of lanes, for one token
GEOMETRY kSingleSimdgroups = 2;      // simdgroups of a threadgroup: fewer give more threadgroups
GEOMETRY kFewRows = 4;               // rows of a group of lanes, for a few tokens
GEOMETRY kFewPairs = 2;              // pairs that share a reading of the rows
GEOMETRY kFewDownRows = 8;           // rows of a threadgroup of the down projection, for 2 to 32 tokens
GEOMETRY kFewSimdgroups = 4;
GEOMETRY kDownSimdgroups = 8;
GEOMETRY kDownThreads = kDownSimdgroups * kSimdWidth;
// Declared by the kernels for a few tokens: with kMatmulBound they take 5 to 10 % longer in int4 on an H200.
GEOMETRY kFewBound = kDownThreads;
GEOMETRY kMaxFewPairs = 512;  // their terms take 16 KiB of threadgroup memory

// A matrix for each head, transposed: columns of a threadgroup, and simdgroups that share its rows
GEOMETRY kHeadColumns = 128;
GEOMETRY kHeadSimdgroups = 8;

GEOMETRY kEmbeddingThreads = 128;

// Many tokens: matrix products
GEOMETRY kTilePairs = 32;
GEOMETRY kGemmRows = 128;  // rows of a threadgroup
GEOMETRY kGemmSimdgroups = 4;
GEOMETRY kSplitTilePairs = 16;  // where simdgroups split the inputs: kTilePairs take more registers
GEOMETRY kCombineColumns = 4;   // columns of a thread

// The same on tensor units: four simdgroups share each product of kTensorDepth inputs
GEOMETRY kLargeTilePairs = 64;
GEOMETRY kTensorRows = 64;   // rows of a threadgroup
GEOMETRY kTensorDepth = 64;  // inputs of a step
GEOMETRY kTensorSimdgroups = 4;
GEOMETRY kTensorThreads = kTensorSimdgroups * kSimdWidth;
