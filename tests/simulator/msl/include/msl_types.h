// Type traits, limits, bit casts and small containers, for the executor and for CUDA.
#pragma once
#include "msl_math.h"

#ifndef __CUDACC_RTC__  // where the translator rewrites literals
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
#endif

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

#include "numeric_limits.h"

template <class T, size_t N>
struct array {
  T values[N];
  MSL_INLINE T& operator[](size_t i) { return values[i]; }
  MSL_INLINE const T& operator[](size_t i) const { return values[i]; }
  static constexpr size_t size() { return N; }
};
}  // namespace metal
