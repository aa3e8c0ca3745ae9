// The lanes of a simdgroup.
#pragma once
#include "common.h"

// The lanes for which `predicate` holds, as bits.
inline uint ballot(bool predicate) {
  return static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(predicate)));
}

// The same number, in a way that the compiler does not see through: what follows from it is computed anew,
// where it would take registers through the loop before. All lanes of the simdgroup arrive.
inline uint anew(uint x, uint lane) {
  return simd_shuffle(x, ushort(lane));
}

// A lane's place in a simdgroup matrix of 8x8. Metal leaves it open; it is the same on all Apple GPUs up to
// now.
struct MatrixPlace {
  uint row;
  uint quarter;  // the lane's elements are in columns 2 * quarter and 2 * quarter + 1

  MatrixPlace(uint lane) : row((lane / 16 * 4) + lane / 2 % 4), quarter(lane / 8 % 2 * 2 + lane % 2) {}
};
