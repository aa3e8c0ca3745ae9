// Vectors of 2, 3 and 4. Swizzles are functions: the translator writes `.xy` as a call.
#pragma once
#include "metal_types.h"

namespace metal {
template <class T, int N>
struct vec;

#define METAL_VECTOR_MEMBERS(N)                                            \
  vec() = default;                                                         \
  METAL_FUNC T& operator[](int i) {                                        \
    return (&x)[i];                                                        \
  }                                                                        \
  METAL_FUNC const T& operator[](int i) const {                            \
    return (&x)[i];                                                        \
  }                                                                        \
  template <class U, class = enable_if_t<!is_same_v<T, U>>>                \
  METAL_FUNC explicit vec(const vec<U, N>& other) {                        \
    _Pragma("unroll") for (int i = 0; i < N; ++i)(*this)[i] = T(other[i]); \
  }                                                                        \
  template <int... I>                                                      \
  METAL_FUNC vec<T, sizeof...(I)> swizzle() const {                        \
    return vec<T, sizeof...(I)>((*this)[I]...);                            \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  METAL_VECTOR_MEMBERS(2)
  METAL_FUNC vec(T a) : x(a), y(a) {}
  METAL_FUNC vec(T a, T b) : x(a), y(b) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  METAL_VECTOR_MEMBERS(3)
  METAL_FUNC vec(T a) : x(a), y(a), z(a) {}
  METAL_FUNC vec(T a, T b, T c) : x(a), y(b), z(c) {}
  METAL_FUNC vec(vec<T, 2> a, T b) : x(a.x), y(a.y), z(b) {}
};
template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) vec<T, 4> {
  T x, y, z, w;
  METAL_VECTOR_MEMBERS(4)
  METAL_FUNC vec(T a) : x(a), y(a), z(a), w(a) {}
  METAL_FUNC vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  METAL_FUNC vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  METAL_FUNC vec(vec<T, 3> a, T b) : x(a.x), y(a.y), z(a.z), w(b) {}
};

#define METAL_VECTOR_OPERATOR(op)                                         \
  template <class T, int N>                                               \
  METAL_FUNC vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {            \
    _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = T(a[i] op b[i]); \
    return a;                                                             \
  }                                                                       \
  template <class T, int N, class S, class = if_number<S>>                \
  METAL_FUNC vec<T, N> operator op(vec<T, N> a, S b) {                    \
    return a op vec<T, N>(T(b));                                          \
  }                                                                       \
  template <class T, int N, class S, class = if_number<S>>                \
  METAL_FUNC vec<T, N> operator op(S a, vec<T, N> b) {                    \
    return vec<T, N>(T(a)) op b;                                          \
  }                                                                       \
  template <class T, int N, class S>                                      \
  METAL_FUNC vec<T, N>& operator op##=(vec<T, N>& a, S b) {               \
    return a = a op b;                                                    \
  }
METAL_VECTOR_OPERATOR(+)
METAL_VECTOR_OPERATOR(-)
METAL_VECTOR_OPERATOR(*)
METAL_VECTOR_OPERATOR(/)
METAL_VECTOR_OPERATOR(%)
METAL_VECTOR_OPERATOR(&)
METAL_VECTOR_OPERATOR(|)
METAL_VECTOR_OPERATOR(^)
METAL_VECTOR_OPERATOR(<<)
METAL_VECTOR_OPERATOR(>>)
template <class T, int N>
METAL_FUNC vec<T, N> operator-(vec<T, N> a) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = -a[i];
  return a;
}
template <class T, int N>
METAL_FUNC vec<T, N> operator~(vec<T, N> a) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = ~a[i];
  return a;
}

#define METAL_COMPARISON(op)                                                \
  template <class T, int N>                                                 \
  METAL_FUNC vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) {           \
    vec<bool, N> result;                                                    \
    _Pragma("unroll") for (int i = 0; i < N; ++i) result[i] = a[i] op b[i]; \
    return result;                                                          \
  }
METAL_COMPARISON(<)
METAL_COMPARISON(<=)
METAL_COMPARISON(>)
METAL_COMPARISON(>=)
METAL_COMPARISON(==)
METAL_COMPARISON(!=)

#define METAL_VECTORS(T)  \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
METAL_VECTORS(bool)
METAL_VECTORS(char)
METAL_VECTORS(uchar)
METAL_VECTORS(short)
METAL_VECTORS(ushort)
METAL_VECTORS(int)
METAL_VECTORS(uint)
METAL_VECTORS(long)
METAL_VECTORS(ulong)
METAL_VECTORS(half)
METAL_VECTORS(bfloat)
METAL_VECTORS(float)
}  // namespace metal
