// Attention
#pragma once

// The sum over chunks, and writing caches. attention/block.h has the sizes of the other kernels.
GEOMETRY kQueryColumns = 64;  // queries in threadgroup memory are a multiple of this wide
GEOMETRY kMergeSimdgroups = 8;
GEOMETRY kMergeColumns = 4;  // columns of a thread
GEOMETRY kMergeChunks = 4;   // of a thread, that are loaded before any is used
GEOMETRY kCacheThreads = 128;
