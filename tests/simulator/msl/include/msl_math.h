// Mathematics of Metal, evaluated in float (half is rounded once, to nearest even) or in integers.
// Metal has none for bfloat: a bfloat argument is converted to float, and the result is a float. For the
// executor and for CUDA.
#pragma once
#include "msl_vector.h"

namespace msl {
template <class T>
MSL_INLINE auto unsigned_of(T x) {
  if constexpr (sizeof(T) == 1) {
    return uchar(x);
  } else if constexpr (sizeof(T) == 2) {
    return ushort(x);
  } else if constexpr (sizeof(T) == 4) {
    return uint(x);
  } else {
    return ulong(x);
  }
}
template <class B>
using if_bfloat = std::enable_if_t<std::is_same_v<B, bfloat>, float>;
template <class T>
using if_not_bfloat = std::enable_if_t<!std::is_same_v<T, bfloat>>;
}  // namespace msl
namespace metal {

// Element-wise forms for vectors, and scalars wherever a vector is expected.
#define MSL_VECTOR1(name)                                  \
  template <class T, int N, class = msl::if_not_bfloat<T>> \
  MSL_INLINE auto name(vec<T, N> x) {                      \
    vec<decltype(name(T())), N> r;                         \
    MSL_EACH(i, N) r[i] = name(x[i]);                      \
    return r;                                              \
  }
#define MSL_VECTOR2(name)                                                                \
  template <class T, int N, class = msl::if_not_bfloat<T>>                               \
  MSL_INLINE auto name(vec<T, N> x, msl::identity_t<vec<T, N>> y) {                      \
    vec<decltype(name(T(), T())), N> r;                                                  \
    MSL_EACH(i, N) r[i] = name(x[i], y[i]);                                              \
    return r;                                                                            \
  }                                                                                      \
  template <class S, class T, int N, class = std::enable_if_t<msl::shape<S>::size == 1>, \
            class = msl::if_not_bfloat<T>>                                               \
  MSL_INLINE auto name(S x, vec<T, N> y) {                                               \
    return name(vec<T, N>(x), y);                                                        \
  }
#define MSL_VECTOR3(name)                                                                              \
  template <class T, int N, class = msl::if_not_bfloat<T>>                                             \
  MSL_INLINE vec<T, N> name(vec<T, N> x, msl::identity_t<vec<T, N>> y, msl::identity_t<vec<T, N>> z) { \
    vec<T, N> r;                                                                                       \
    MSL_EACH(i, N)                                                                                     \
    r[i] = name(x[i], y[i], z[i]);                                                                     \
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

// Of integers, a function for each type.
// clang-format off
#define MSL_INTEGER_TYPES(DEFINE, ...)                                            \
  DEFINE(char, __VA_ARGS__) DEFINE(uchar, __VA_ARGS__) DEFINE(short, __VA_ARGS__) \
  DEFINE(ushort, __VA_ARGS__) DEFINE(int, __VA_ARGS__) DEFINE(uint, __VA_ARGS__)  \
  DEFINE(long, __VA_ARGS__) DEFINE(ulong, __VA_ARGS__)
// clang-format on
#define MSL_INTEGERS1(...) MSL_INTEGER_TYPES(MSL_INTEGER1, __VA_ARGS__)
#define MSL_INTEGERS2(...) MSL_INTEGER_TYPES(MSL_INTEGER2, __VA_ARGS__)
#define MSL_INTEGERS3(...) MSL_INTEGER_TYPES(MSL_INTEGER3, __VA_ARGS__)
#define MSL_INTEGER1(Type, name, expression) \
  MSL_INLINE Type name(Type x) {             \
    typedef Type T;                          \
    return expression;                       \
  }
#define MSL_INTEGER2(Type, name, expression) \
  MSL_INLINE Type name(Type x, Type y) {     \
    return expression;                       \
  }
#define MSL_INTEGER3(Type, name, expression)     \
  MSL_INLINE Type name(Type x, Type y, Type z) { \
    return expression;                           \
  }
#include "functions.h"

MSL_INLINE float ldexp(float x, int exponent) {
  return MSL_C(ldexpf)(x, exponent);
}
MSL_INLINE half ldexp(half x, int exponent) {
  return half(MSL_C(ldexpf)(float(x), exponent));
}
MSL_INLINE float nextafter(float x, float y) {
  return MSL_C(nextafterf)(x, y);
}
MSL_INLINE half nextafter(half x, half y) {
  if (MSL_C(isnan)(float(x)) || MSL_C(isnan)(float(y))) return half(NAN);
  short bits = __builtin_bit_cast(short, x);
  if (x == y) return y;
  if (x == half(0)) return y > x ? half(0x1p-24f) : half(-0x1p-24f);
  bits += (y > x) == (bits > 0) ? 1 : -1;
  return __builtin_bit_cast(half, bits);
}
MSL_INLINE float frexp(float x, int& exponent) {
  return MSL_C(frexpf)(x, &exponent);
}
MSL_INLINE half frexp(half x, int& exponent) {
  return half(MSL_C(frexpf)(float(x), &exponent));
}
template <class T>
MSL_INLINE std::enable_if_t<msl::shape<T>::size == 1, T> select(T a, T b, bool condition) {
  return condition ? b : a;
}
template <class T, int N>
MSL_INLINE vec<T, N> select(vec<T, N> a, msl::identity_t<vec<T, N>> b, vec<bool, N> condition) {
  MSL_EACH(i, N)
  if (condition[i]) a[i] = b[i];
  return a;
}
template <class T, int N>
MSL_INLINE vec<T, N> select(vec<T, N> a, msl::identity_t<vec<T, N>> b, bool condition) {
  return condition ? b : a;
}
template <int N>
MSL_INLINE bool any(vec<bool, N> x) {
  bool r = false;
  MSL_EACH(i, N) r = r || x[i];
  return r;
}
template <int N>
MSL_INLINE bool all(vec<bool, N> x) {
  bool r = true;
  MSL_EACH(i, N) r = r && x[i];
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
  T sum = a[0] * b[0];
  MSL_EACH(i, N - 1) sum += a[i + 1] * b[i + 1];
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
  return a.template msl_swizzle<1, 2, 0>() * b.template msl_swizzle<2, 0, 1>() -
         a.template msl_swizzle<2, 0, 1>() * b.template msl_swizzle<1, 2, 0>();
}
}  // namespace metal
