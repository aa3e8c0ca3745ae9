// Sampling: a threadgroup takes a row of logits
#pragma once

GEOMETRY kSampleThreads = 1024;
GEOMETRY kSampleChunk = 128;         // tokens of which the highest score is kept
GEOMETRY kSampleChunks = 4096;       // at most, in threadgroup memory
GEOMETRY kWholeWeight = 0x80000000;  // of all tokens that top-p is asked about
GEOMETRY kSampleBins = kSampleThreads;
