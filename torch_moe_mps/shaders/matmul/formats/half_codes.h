// Integer codes as halves.
#pragma once
#include "matmul/formats.h"

// The 32 bits from `bit` on, which is at least -32. Those outside of the words are arbitrary.
template <int kWords>
inline uint bits_from(Words<kWords> words, int bit) {
  const int end = bit + 32, word = end / 32, shift = end % 32;
  const uint low = words.v[max(word - 1, 0)], high = words.v[min(word, kWords - 1)];
  return low >> shift | (high << (31 - shift)) << 1;
}

// Unsigned codes, two at a time (a code pair), as the mantissas of two halves with a fixed exponent: this
// needs no conversion from integers, which takes four cycles on Apple's GPUs. The codes of a pair are about
// 16 bits apart, so that one shift and one mask extract both. Where they are not exactly 16 bits apart, one
// of them is raised: it stays kRaised bits up in its half. Where they are, and two codes fit into a mantissa,
// one shift serves two pairs, and both codes of the second are raised. The exponent is chosen so that the
// lowest bit of a code counts 1: a half is added(height) + code.
template <int kBits>
struct HalfCodes {
  static constant constexpr int kCodePairs = kBits <= 2 ? 8 : kBits < 6 ? 4 : 2;  // of a run of codes
  static constant constexpr int kApart = kCodePairs * kBits;  // bits from a code to the other of its pair
  static constant constexpr bool kSharesShifts = kApart == 16 && 2 * kBits <= 10;
  static constant constexpr int kRaised = kSharesShifts ? kBits : kApart < 16 ? 16 - kApart : kApart - 16;
  static constant constexpr int kHeights = kRaised > 0 ? 2 : 1;

  // 1 for a code that is raised, else 0.
  static int height(int pair, int element) {
    return kSharesShifts ? pair % 2 : kApart < 16 ? 1 - element : kApart > 16 ? element : 0;
  }
  static float added(int height) { return float(1024 >> (height * kRaised)); }

  static FragmentElement place_of(int value) {
    const int run = value / (2 * kCodePairs), in_run = value % (2 * kCodePairs);
    return {run * kCodePairs + in_run % kCodePairs, in_run / kCodePairs};
  }

  template <int kWords>
  static half2 pair(Words<kWords> words, int pair) {
    const int first = kRaised * height(pair, 0), second = kRaised * height(pair, 1);
    const int code = pair / kCodePairs * 2 * kCodePairs + pair % kCodePairs;
    const uint mask = (1u << kBits) - 1, masks = mask << first | mask << second << 16;
    const uint exponents = 0x64006400u - uint(first) * 0x400u - uint(second) * 0x4000000u;
    return as_type<half2>((bits_from(words, code * kBits - first) & masks) | exponents);
  }
};
