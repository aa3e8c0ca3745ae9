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

// Experts, one token
GEOMETRY kSingleRows = 4;  // of a simdgroup; down: of a threadgroup
GEOMETRY kSingleSimdgroups = 8;
GEOMETRY kColumnSimdgroups = 16;  // transposed weights

// Experts, 2 to 32 tokens: dense and mxfp4
GEOMETRY kFewRows = 8;  // of a simdgroup; down: of a threadgroup
GEOMETRY kFewSimdgroups = 8;
GEOMETRY kMaxFewPairs = 512;  // their numbers, and their terms in down, lie in threadgroup memory

// The same for affine weights
GEOMETRY kMatrixRows = 16;  // of a simdgroup
GEOMETRY kMatrixSimdgroups = 4;
GEOMETRY kLastBlocks = 600;           // about as many of rows: see UnitBlocks in expert_rows_matrix.h
GEOMETRY kHalvedBlocks = 120;         // the last of these
GEOMETRY kMatrixDownRows = 16;        // of a threadgroup
GEOMETRY kMatrixDownSimdgroups = 12;  // more leave each too few registers
GEOMETRY kPartsSimdgroups = 16;       // of a threadgroup that shares its experts' columns out
GEOMETRY kMatrixPairsAtOnce = 32;     // of one expert: more read its rows again
GEOMETRY kMaxMatrixPairs = 384;

// Experts, more tokens
GEOMETRY kTileRows = 32;  // pairs
GEOMETRY kTileColumns = 64;
GEOMETRY kGemmThreads = 128;
GEOMETRY kCombineColumns = 4;  // of a thread
