// How long a dispatch takes, by estimate: for command buffers that are neither so short that committing them
// costs more than it brings, nor so long that macOS stops them to draw the display.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../gpu.h"

namespace moe_mps {

// Of a core of an M1's GPU, the slowest there is, at 1.28 GHz and 68 GB/s for 8 of them
// (tests/simulator/apple).
constexpr double kIssueCyclesOfCore = 1.64e11;  // instructions of a lane a second
constexpr double kBytesOfCore = 6.8e9;
// Issue cycles of a multiply-add by the cost model, on an M1 in bfloat16: 1.2 to 1.44, and 2.4 to 2.8.
constexpr double kIssueCyclesOfProduct = 1.45;
constexpr double kIssueCyclesOfAttention = 2.8;
constexpr double kIssueCyclesOfHeads = 12;  // dot products, which decode for each few tokens
// Issue cycles of an element of a recurrence's state and a token: threadgroup memory takes as long as 15 of
// its 8.
constexpr double kIssueCyclesOfScan = 15;

// Work is committed once it takes so long. macOS stops a buffer after 1 to 5 s, and the display wants to draw
// all the time.
constexpr double kBufferSeconds = 0.1;
// A dispatch that takes longer is made in blocks of tokens; `_limit_dispatches` changes it, for tests.
inline std::atomic<double> dispatch_seconds = 0.15;

inline double seconds_of(double issue_cycles, double bytes) {
  return std::max(issue_cycles / kIssueCyclesOfCore, bytes / kBytesOfCore) / static_cast<double>(gpu_cores());
}

inline bool is_too_long(double issue_cycles) {
  return seconds_of(issue_cycles, 0) > dispatch_seconds;
}

// How many of a call's tokens one dispatch takes, in whole tiles, where all of them take so many issue
// cycles.
inline int64_t tokens_at_once(int64_t tokens, double issue_cycles) {
  constexpr int64_t kTile = 64;
  if (!is_too_long(issue_cycles)) return tokens;
  const auto some =
      static_cast<int64_t>(static_cast<double>(tokens) * dispatch_seconds / seconds_of(issue_cycles, 0));
  return std::max(kTile, some / kTile * kTile);
}

}  // namespace moe_mps
