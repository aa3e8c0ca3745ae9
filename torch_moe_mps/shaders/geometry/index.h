// Sparse attention
#pragma once

// Keys of a threadgroup, heads whose queries it holds at a time, and their widest
GEOMETRY kIndexKeys = 128;
GEOMETRY kIndexThreads = 64;
GEOMETRY kIndexHeads = 16;
GEOMETRY kIndexWidth = 256;
GEOMETRY kBlockHeads = 4;  // of which a simdgroup scores a block of keys at a time
GEOMETRY kIndexSimdgroups = kIndexThreads / 32;
GEOMETRY kSelectThreads = 1024;
GEOMETRY kSelectBins = 2048;
