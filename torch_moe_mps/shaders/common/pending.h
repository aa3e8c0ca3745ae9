// Tokens of a deferred state update.
#pragma once
#include "common.h"

// How many tokens of a row are pending and right.
inline uint count_of(device const int* counts, uint room, ulong batch) {
  return room == 0 ? 0 : uint(clamp(counts[batch], 0, int(room)));
}
