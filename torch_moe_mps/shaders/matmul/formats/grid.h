// The grid of a format.
#pragma once
#include "common.h"

// The points of the format's grid, of the host. Of two values, they are halves. Of more, a value with a sign
// has its magnitude in 8 bits, those from bit 5 on of a half that is the magnitude / 2^16; one without has
// its level in 4, -1, 0 and 1 as 0, 1 and 2. The second of two neighbours is 16 bits above the first.
#ifndef MOE_GRID
#define MOE_GRID_WORDS 1
#define MOE_GRID 0
#endif
struct alignas(8) Grid {  // so that two words are one load
  uint words[MOE_GRID_WORDS];
};
constant constexpr Grid kGrid = {{MOE_GRID}};
