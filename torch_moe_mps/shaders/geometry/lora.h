// Low-rank adapters
#pragma once

GEOMETRY kLoraThreads = 128;  // of a threadgroup; of an outer product, a column each
GEOMETRY kLoraPairs = 4;      // of a tile, at most
GEOMETRY kLoraRanks = 4;      // inner products of a pair at a time
GEOMETRY kOuterRanks = 8;     // sums of a column at a time
GEOMETRY kOuterPairs = 32;    // whose inner products are staged together
