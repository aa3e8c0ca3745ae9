// numeric_limits, for the executor, CUDA and the strict check. MSL_LIMIT makes a value, given with its bits.
#pragma once
#ifndef MSL_LIMIT
#define MSL_LIMIT(T, value, bits) T(value)
#endif

template <class T>
struct numeric_limits {  // of integers
  static constexpr T max() { return T(-1) < T(0) ? T((1ul << (8 * sizeof(T) - 1)) - 1) : T(-1); }
  static constexpr T min() { return T(-1) < T(0) ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
// A value, and its bits.
#define MSL_LIMITS(T, MAX, MAX_BITS, MIN, MIN_BITS, EPSILON, EPSILON_BITS, INFINITE, NOT_NUMBER) \
  template <>                                                                                    \
  struct numeric_limits<T> {                                                                     \
    static constexpr T max() {                                                                   \
      return MSL_LIMIT(T, MAX, MAX_BITS);                                                        \
    }                                                                                            \
    static constexpr T min() {                                                                   \
      return MSL_LIMIT(T, MIN, MIN_BITS);                                                        \
    }                                                                                            \
    static constexpr T lowest() {                                                                \
      return -max();                                                                             \
    }                                                                                            \
    static constexpr T epsilon() {                                                               \
      return MSL_LIMIT(T, EPSILON, EPSILON_BITS);                                                \
    }                                                                                            \
    static constexpr T infinity() {                                                              \
      return MSL_LIMIT(T, INFINITY, INFINITE);                                                   \
    }                                                                                            \
    static constexpr T quiet_NaN() {                                                             \
      return MSL_LIMIT(T, NAN, NOT_NUMBER);                                                      \
    }                                                                                            \
  };
// clang-format off
MSL_LIMITS(float, 0x1.fffffep127f, 0x7f7fffff, 0x1p-126f, 0x00800000, 0x1p-23f, 0x34000000, 0x7f800000, 0x7fc00000)
MSL_LIMITS(half, 0x1.ffcp15f, 0x7bff, 0x1p-14f, 0x0400, 0x1p-10f, 0x1400, 0x7c00, 0x7e00)
MSL_LIMITS(bfloat, 0x1.fep127f, 0x7f7f, 0x1p-126f, 0x0080, 0x1p-7f, 0x3c00, 0x7f80, 0x7fc0)
// clang-format on
