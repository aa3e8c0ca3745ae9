// Mathematics of Metal, evaluated in float (half is rounded once, to nearest even) or in integers.
// Metal has none for bfloat: a bfloat argument is converted to float, and the result is a float.
#pragma once
#include "msl_vector.h"

namespace metal {
namespace precise = ::metal;
namespace fast = ::metal;

}  // namespace metal
namespace msl {
template <class B>
using if_bfloat = std::enable_if_t<std::is_same_v<B, bfloat>, float>;
template <class T>
using if_not_bfloat = std::enable_if_t<!std::is_same_v<T, bfloat>>;
}  // namespace msl
namespace metal {

// Element-wise forms for vectors, and scalars wherever a vector is expected.
#define MSL_VECTOR1(name)                                                  \
  template <class T, int N, class = msl::if_not_bfloat<T>>                 \
  MSL_INLINE auto name(vec<T, N> x) {                                      \
    vec<decltype(name(T())), N> r;                                         \
    for (int i = 0; i < N; i++) r.msl_element(i) = name(x.msl_element(i)); \
    return r;                                                              \
  }
#define MSL_VECTOR2(name)                                                                    \
  template <class T, int N, class = msl::if_not_bfloat<T>>                                   \
  MSL_INLINE auto name(vec<T, N> x, msl::identity_t<vec<T, N>> y) {                          \
    vec<decltype(name(T(), T())), N> r;                                                      \
    for (int i = 0; i < N; i++) r.msl_element(i) = name(x.msl_element(i), y.msl_element(i)); \
    return r;                                                                                \
  }                                                                                          \
  template <class S, class T, int N, class = std::enable_if_t<msl::shape<S>::size == 1>,     \
            class = msl::if_not_bfloat<T>>                                                   \
  MSL_INLINE auto name(S x, vec<T, N> y) {                                                   \
    return name(vec<T, N>(x), y);                                                            \
  }
#define MSL_VECTOR3(name)                                                                              \
  template <class T, int N, class = msl::if_not_bfloat<T>>                                             \
  MSL_INLINE vec<T, N> name(vec<T, N> x, msl::identity_t<vec<T, N>> y, msl::identity_t<vec<T, N>> z) { \
    vec<T, N> r;                                                                                       \
    for (int i = 0; i < N; i++)                                                                        \
      r.msl_element(i) = name(x.msl_element(i), y.msl_element(i), z.msl_element(i));                   \
    return r;                                                                                          \
  }

#define MSL_FLOAT1(name, expression)       \
  MSL_INLINE float name(float x) {         \
    return expression;                     \
  }                                        \
  MSL_INLINE half name(half x) {           \
    return half(name(float(x)));           \
  }                                        \
  template <class B>                       \
  MSL_INLINE msl::if_bfloat<B> name(B x) { \
    return name(float(x));                 \
  }                                        \
  MSL_VECTOR1(name)
#define MSL_FLOAT2(name, expression)            \
  MSL_INLINE float name(float x, float y) {     \
    return expression;                          \
  }                                             \
  MSL_INLINE half name(half x, half y) {        \
    return half(name(float(x), float(y)));      \
  }                                             \
  template <class B>                            \
  MSL_INLINE msl::if_bfloat<B> name(B x, B y) { \
    return name(float(x), float(y));            \
  }                                             \
  MSL_VECTOR2(name)
#define MSL_FLOAT3(name, expression)                 \
  MSL_INLINE float name(float x, float y, float z) { \
    return expression;                               \
  }                                                  \
  MSL_INLINE half name(half x, half y, half z) {     \
    return half(name(float(x), float(y), float(z))); \
  }                                                  \
  template <class B>                                 \
  MSL_INLINE msl::if_bfloat<B> name(B x, B y, B z) { \
    return name(float(x), float(y), float(z));       \
  }                                                  \
  MSL_VECTOR3(name)
#define MSL_TEST1(name, expression)             \
  MSL_INLINE bool name(float x) {               \
    return expression;                          \
  }                                             \
  MSL_INLINE bool name(half x) {                \
    return name(float(x));                      \
  }                                             \
  template <class B, class = msl::if_bfloat<B>> \
  MSL_INLINE bool name(B x) {                   \
    return name(float(x));                      \
  }                                             \
  MSL_VECTOR1(name)

#define MSL_INTEGER(T)                                                           \
  MSL_INLINE T min(T x, T y) {                                                   \
    return y < x ? y : x;                                                        \
  }                                                                              \
  MSL_INLINE T max(T x, T y) {                                                   \
    return x < y ? y : x;                                                        \
  }                                                                              \
  MSL_INLINE T abs(T x) {                                                        \
    return x < T(0) ? T(-x) : x;                                                 \
  }                                                                              \
  MSL_INLINE T clamp(T x, T low, T high) {                                       \
    return min(max(x, low), high);                                               \
  }                                                                              \
  MSL_INLINE T min3(T x, T y, T z) {                                             \
    return min(x, min(y, z));                                                    \
  }                                                                              \
  MSL_INLINE T max3(T x, T y, T z) {                                             \
    return max(x, max(y, z));                                                    \
  }                                                                              \
  MSL_INLINE T median3(T x, T y, T z) {                                          \
    return max(min(x, y), min(max(x, y), z));                                    \
  }                                                                              \
  MSL_INLINE T popcount(T x) {                                                   \
    return T(__builtin_popcountl(std::make_unsigned_t<T>(x)));                   \
  }                                                                              \
  MSL_INLINE T ctz(T x) {                                                        \
    return x ? T(__builtin_ctzl(std::make_unsigned_t<T>(x))) : T(8 * sizeof(T)); \
  }
// clang-format off
MSL_INTEGER(char)
MSL_INTEGER(uchar)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
MSL_VECTOR1(popcount)
MSL_VECTOR1(ctz)
// Their vector forms serve integers, too: a template sees only functions that are declared before it.
MSL_FLOAT1(abs, __builtin_fabsf(x))
// Of a NaN and a number, the number.
MSL_FLOAT2(max, __builtin_fmaxf(x, y))
MSL_FLOAT2(min, __builtin_fminf(x, y))
MSL_FLOAT3(clamp, min(max(x, y), z))
MSL_FLOAT3(max3, max(x, max(y, z)))
MSL_FLOAT3(min3, min(x, min(y, z)))
MSL_FLOAT3(median3, max(min(x, y), min(max(x, y), z)))
MSL_FLOAT1(acos, __builtin_acosf(x))
MSL_FLOAT1(acosh, __builtin_acoshf(x))
MSL_FLOAT1(asin, __builtin_asinf(x))
MSL_FLOAT1(asinh, __builtin_asinhf(x))
MSL_FLOAT1(atan, __builtin_atanf(x))
MSL_FLOAT1(atanh, __builtin_atanhf(x))
MSL_FLOAT1(ceil, __builtin_ceilf(x))
MSL_FLOAT1(cos, __builtin_cosf(x))
MSL_FLOAT1(cosh, __builtin_coshf(x))
MSL_FLOAT1(cospi, float(__builtin_cos(double(3.14159265358979323846L) * __builtin_fmod(double(x), 2.0))))
MSL_FLOAT1(exp, __builtin_expf(x))
MSL_FLOAT1(exp2, __builtin_exp2f(x))
MSL_FLOAT1(exp10, float(__builtin_pow(10.0, double(x))))
MSL_FLOAT1(fabs, abs(x))
MSL_FLOAT1(floor, __builtin_floorf(x))
MSL_FLOAT1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
MSL_FLOAT1(log, __builtin_logf(x))
MSL_FLOAT1(log2, __builtin_log2f(x))
MSL_FLOAT1(log10, __builtin_log10f(x))
MSL_FLOAT1(rint, __builtin_rintf(x))
MSL_FLOAT1(round, __builtin_roundf(x))
MSL_FLOAT1(rsqrt, float(1.0 / __builtin_sqrt(double(x))))
MSL_FLOAT1(sin, __builtin_sinf(x))
MSL_FLOAT1(sinh, __builtin_sinhf(x))
MSL_FLOAT1(sinpi, float(__builtin_sin(double(3.14159265358979323846L) * __builtin_fmod(double(x), 2.0))))
MSL_FLOAT1(sqrt, __builtin_sqrtf(x))
MSL_FLOAT1(tan, __builtin_tanf(x))
MSL_FLOAT1(tanh, __builtin_tanhf(x))
MSL_FLOAT1(tanpi, float(__builtin_tan(double(3.14159265358979323846L) * __builtin_fmod(double(x), 1.0))))
MSL_FLOAT1(trunc, __builtin_truncf(x))
MSL_FLOAT1(saturate, clamp(x, 0.0f, 1.0f))
MSL_FLOAT1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f)
MSL_FLOAT2(atan2, __builtin_atan2f(x, y))
MSL_FLOAT2(copysign, __builtin_copysignf(x, y))
MSL_FLOAT2(fdim, __builtin_fdimf(x, y))
MSL_FLOAT2(fmax, max(x, y))
MSL_FLOAT2(fmin, min(x, y))
MSL_FLOAT2(fmod, __builtin_fmodf(x, y))
MSL_FLOAT2(pow, __builtin_powf(x, y))
MSL_FLOAT2(powr, __builtin_powf(x, y))
MSL_FLOAT2(step, y < x ? 0.0f : 1.0f)
MSL_FLOAT2(divide, x / y)
MSL_FLOAT3(fma, __builtin_fmaf(x, y, z))
MSL_FLOAT3(mix, x + (y - x) * z)
MSL_FLOAT3(fmax3, max3(x, y, z))
MSL_FLOAT3(fmin3, min3(x, y, z))
MSL_FLOAT3(fmedian3, median3(x, y, z))
MSL_TEST1(isnan, __builtin_isnan(x))
MSL_TEST1(isinf, __builtin_isinf(x))
MSL_TEST1(isfinite, __builtin_isfinite(x))
MSL_TEST1(signbit, __builtin_signbit(x))
// clang-format on

MSL_INLINE float ldexp(float x, int exponent) {
  return __builtin_ldexpf(x, exponent);
}
MSL_INLINE half ldexp(half x, int exponent) {
  return half(__builtin_ldexpf(float(x), exponent));
}
MSL_INLINE float nextafter(float x, float y) {
  return __builtin_nextafterf(x, y);
}
MSL_INLINE half nextafter(half x, half y) {
  if (__builtin_isnan(float(x)) || __builtin_isnan(float(y))) return half(__builtin_nanf(""));
  short bits = __builtin_bit_cast(short, x);
  if (x == y) return y;
  if (x == half(0)) return y > x ? half(0x1p-24f) : half(-0x1p-24f);
  bits += (y > x) == (bits > 0) ? 1 : -1;
  return __builtin_bit_cast(half, bits);
}
MSL_INLINE float frexp(float x, int& exponent) {
  return __builtin_frexpf(x, &exponent);
}
MSL_INLINE half frexp(half x, int& exponent) {
  return half(__builtin_frexpf(float(x), &exponent));
}
template <class T>
MSL_INLINE std::enable_if_t<msl::shape<T>::size == 1, T> select(T a, T b, bool condition) {
  return condition ? b : a;
}
template <class T, int N>
MSL_INLINE vec<T, N> select(vec<T, N> a, msl::identity_t<vec<T, N>> b, vec<bool, N> condition) {
  for (int i = 0; i < N; i++)
    if (condition.msl_element(i)) a.msl_element(i) = b.msl_element(i);
  return a;
}
template <class T, int N>
MSL_INLINE vec<T, N> select(vec<T, N> a, msl::identity_t<vec<T, N>> b, bool condition) {
  return condition ? b : a;
}
template <int N>
MSL_INLINE bool any(vec<bool, N> x) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || x.msl_element(i);
  return r;
}
template <int N>
MSL_INLINE bool all(vec<bool, N> x) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && x.msl_element(i);
  return r;
}
MSL_INLINE bool any(bool x) {
  return x;
}
MSL_INLINE bool all(bool x) {
  return x;
}

template <class T, int N, class = msl::if_not_bfloat<T>>
MSL_INLINE T dot(vec<T, N> a, msl::identity_t<vec<T, N>> b) {
  T sum = a.msl_element(0) * b.msl_element(0);
  for (int i = 1; i < N; i++) sum += a.msl_element(i) * b.msl_element(i);
  return sum;
}
template <class T, int N>
MSL_INLINE T length(vec<T, N> x) {
  return sqrt(dot(x, x));
}
template <class T, int N>
MSL_INLINE T distance(vec<T, N> x, msl::identity_t<vec<T, N>> y) {
  return length(x - y);
}
template <class T, int N>
MSL_INLINE vec<T, N> normalize(vec<T, N> x) {
  return x * vec<T, N>(rsqrt(dot(x, x)));
}
template <class T>
MSL_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}
}  // namespace metal
