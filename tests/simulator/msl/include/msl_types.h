// Type traits, limits, bit casts and small containers.
#pragma once
#include <limits>

#include "constants.h"
#include "msl_math.h"

constexpr half operator""h(long double x) {
  return half(x);
}
constexpr half operator"" H(long double x) {
  return half(x);
}
constexpr bfloat operator"" bf(long double x) {
  return bfloat(float(x));
}
constexpr bfloat operator"" BF(long double x) {
  return bfloat(float(x));
}

template <class To, class From>
MSL_INLINE To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, x);
}

namespace metal {
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible_v;
using std::is_integral;
using std::is_integral_v;
using std::is_same;
using std::is_same_v;
using std::is_signed_v;
using std::is_unsigned_v;
using std::remove_cv_t;
using std::true_type;
template <class T>
using remove_addrspace_t = T;
template <class T>
inline constexpr bool is_floating_point_v = msl::is_float<std::remove_cv_t<T>>;

template <class T, class = void>
struct numeric_limits {};
template <class T>
struct numeric_limits<T, std::enable_if_t<msl::is_int<T> || std::is_same_v<T, bool>>> {
  typedef std::numeric_limits<T> standard;
  static constexpr bool is_signed = standard::is_signed, is_integer = true, has_infinity = false;
  static constexpr int digits = standard::digits;
  static constexpr T max() { return standard::max(); }
  static constexpr T min() { return standard::min(); }
  static constexpr T lowest() { return standard::min(); }
};
#define MSL_LIMITS(T, DIGITS, MAX, MIN, EPSILON)                                     \
  template <>                                                                        \
  struct numeric_limits<T> {                                                         \
    static constexpr bool is_signed = true, is_integer = false, has_infinity = true; \
    static constexpr int digits = DIGITS;                                            \
    static constexpr T max() {                                                       \
      return T(MAX);                                                                 \
    }                                                                                \
    static constexpr T min() {                                                       \
      return T(MIN);                                                                 \
    }                                                                                \
    static constexpr T lowest() {                                                    \
      return T(-MAX);                                                                \
    }                                                                                \
    static constexpr T epsilon() {                                                   \
      return T(EPSILON);                                                             \
    }                                                                                \
    static constexpr T infinity() {                                                  \
      return T(__builtin_inff());                                                    \
    }                                                                                \
    static constexpr T quiet_NaN() {                                                 \
      return T(__builtin_nanf(""));                                                  \
    }                                                                                \
  };
MSL_LIMITS(float, 24, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__)
MSL_LIMITS(half, 11, 0x1.ffcp15f, 0x1p-14f, 0x1p-10f)
MSL_LIMITS(bfloat, 8, 0x1.fep127f, 0x1p-126f, 0x1p-7f)

template <class T, size_t N>
struct array {
  T values[N];
  MSL_INLINE T& operator[](size_t i) { return values[i]; }
  MSL_INLINE const T& operator[](size_t i) const { return values[i]; }
  static constexpr size_t size() { return N; }
};
}  // namespace metal
