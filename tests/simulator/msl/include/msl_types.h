// Type traits, limits, constants, bit casts and small containers.
#pragma once
#include "msl_math.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define HALF_MAX 0x1.ffcp15h
#define HALF_MIN 0x1.0p-14h
#define HALF_EPSILON 0x1.0p-10h
#define MAXHALF HALF_MAX
#define CHAR_BIT 8
#define CHAR_MAX __SCHAR_MAX__
#define CHAR_MIN (-__SCHAR_MAX__ - 1)
#define UCHAR_MAX (__SCHAR_MAX__ * 2 + 1)
#define SHRT_MAX __SHRT_MAX__
#define SHRT_MIN (-__SHRT_MAX__ - 1)
#define USHRT_MAX (__SHRT_MAX__ * 2 + 1)
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2U + 1)
#define LONG_MAX __LONG_MAX__
#define LONG_MIN (-__LONG_MAX__ - 1)
#define ULONG_MAX (__LONG_MAX__ * 2UL + 1)
#define M_E_F 2.71828182845904523536028747135266250f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LOG10E_F 0.434294481903251827651128918916605082f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LN10_F 2.30258509299404568401799145468436421f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_PI_4_F 0.785398163397448309615660845819875721f
#define M_1_PI_F 0.318309886183790671537767526745028724f
#define M_2_PI_F 0.636619772367581343075535053490057448f
#define M_2_SQRTPI_F 1.12837916709551257389615890312154517f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f

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
using std::decay_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_const_v;
using std::is_convertible;
using std::is_convertible_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer_v;
using std::is_same;
using std::is_same_v;
using std::is_signed;
using std::is_signed_v;
using std::is_unsigned;
using std::is_unsigned_v;
using std::make_signed_t;
using std::make_unsigned_t;
using std::remove_const_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_pointer;
using std::remove_pointer_t;
using std::remove_reference;
using std::remove_reference_t;
using std::true_type;
template <class T>
using remove_addrspace_t = T;
template <class T>
inline constexpr bool is_floating_point_v = msl::is_float<std::remove_cv_t<T>>;

template <class T, class = void>
struct numeric_limits {};
template <class T>
struct numeric_limits<T, std::enable_if_t<msl::is_int<T> || std::is_same_v<T, bool>>> {
  static constexpr bool is_signed = std::is_signed_v<T>, is_integer = true, has_infinity = false;
  static constexpr int digits = std::is_same_v<T, bool> ? 1 : 8 * int(sizeof(T)) - is_signed;
  static constexpr T max() { return std::is_same_v<T, bool> ? T(1) : msl::highest<T>; }
  static constexpr T min() { return msl::lowest<T>; }
  static constexpr T lowest() { return msl::lowest<T>; }
};
#define MSL_LIMITS(T, DIGITS, MAX, MIN, EPSILON, DENORM)                             \
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
    static constexpr T signaling_NaN() {                                             \
      return T(__builtin_nanf(""));                                                  \
    }                                                                                \
    static constexpr T denorm_min() {                                                \
      return T(DENORM);                                                              \
    }                                                                                \
  };
MSL_LIMITS(float, 24, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, __FLT_DENORM_MIN__)
MSL_LIMITS(half, 11, 0x1.ffcp15f, 0x1p-14f, 0x1p-10f, 0x1p-24f)
MSL_LIMITS(bfloat, 8, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 0x1p-133f)

template <class T, size_t N>
struct array {
  T values[N];
  MSL_INLINE T& operator[](size_t i) { return values[i]; }
  MSL_INLINE const T& operator[](size_t i) const { return values[i]; }
  static constexpr size_t size() { return N; }
};
}  // namespace metal
