// Matmuls of experts, heads and linear layers, and embeddings
#pragma once

// Kernels declare this many threads, although they are launched with fewer: with this bound, Apple's compiler
// gives a thread 128 registers on M1.
GEOMETRY kMatmulBound = 384;

// Few tokens: dot products. Simdgroups are those of a plan: kernels whose simdgroups have rows or pairs of
// their own take as many as are launched.
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
GEOMETRY kMaxChosenExperts = 512;  // among which a matmul chooses: a lane has 16 in registers
GEOMETRY kMaxSlots = 64;           // the most experts of a token: MAX_TOP_K of ops/_checks.py
GEOMETRY kMaxFewPairs = 512;       // their terms take 16 KiB of threadgroup memory

// A matrix for each head, transposed: columns of a threadgroup, and simdgroups that share its rows
GEOMETRY kHeadColumns = 128;
GEOMETRY kHeadSimdgroups = 8;

GEOMETRY kEmbeddingThreads = 128;

// Many tokens: matrix products
GEOMETRY kTilePairs = 32;
GEOMETRY kGemmRows = 128;  // rows of a threadgroup
GEOMETRY kGemmSimdgroups = 4;
GEOMETRY kSplitTilePairs = 16;      // where simdgroups split the inputs: kTilePairs take 105 to 127 registers
GEOMETRY kCombineColumns = 4;       // columns of a thread
GEOMETRY kTransposedColumns = 256;  // columns of a threadgroup of the transposed product
GEOMETRY kOuterSide = 32;           // rows and columns of a simdgroup's outer products

// The same on tensor units: four simdgroups share each product of kTensorDepth inputs
GEOMETRY kLargeTilePairs = 64;
GEOMETRY kTensorRows = 64;   // rows of a threadgroup
GEOMETRY kTensorDepth = 64;  // inputs of a step
GEOMETRY kTensorSimdgroups = 4;
GEOMETRY kTensorThreads = kTensorSimdgroups * kSimdWidth;
