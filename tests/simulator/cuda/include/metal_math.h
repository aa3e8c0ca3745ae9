// Metal's mathematical functions. Libraries are compiled with safe math, so a function without `fast::` is
// the precise one.
#pragma once
#include "metal_vector.h"

namespace metal {
#define METAL_FLOAT1(name, expression)                               \
  METAL_FUNC float name(float x) {                                   \
    return expression;                                               \
  }                                                                  \
  template <int N>                                                   \
  METAL_FUNC vec<float, N> name(vec<float, N> x) {                   \
    _Pragma("unroll") for (int i = 0; i < N; ++i) x[i] = name(x[i]); \
    return x;                                                        \
  }
namespace precise {
METAL_FLOAT1(exp, ::expf(x))
METAL_FLOAT1(exp2, ::exp2f(x))
METAL_FLOAT1(log, ::logf(x))
METAL_FLOAT1(log2, ::log2f(x))
METAL_FLOAT1(sqrt, ::sqrtf(x))
METAL_FLOAT1(rsqrt, ::rsqrtf(x))
METAL_FLOAT1(sin, ::sinf(x))
METAL_FLOAT1(cos, ::cosf(x))
METAL_FLOAT1(tanh, ::tanhf(x))
METAL_FUNC float atan2(float x, float y) {
  return ::atan2f(x, y);
}
}  // namespace precise
using namespace precise;
namespace fast {
METAL_FLOAT1(exp, ::__expf(x))
}  // namespace fast
METAL_FLOAT1(erf, ::erff(x))
METAL_FLOAT1(ceil, ::ceilf(x))
METAL_FLOAT1(round, ::roundf(x))
METAL_FLOAT1(rint, ::rintf(x))
METAL_FLOAT1(fabs, ::fabsf(x))
METAL_FLOAT1(sign, float((x > 0) - (x < 0)))
METAL_FLOAT1(saturate, ::__saturatef(x))
METAL_FUNC float fma(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
METAL_FUNC float fmin(float a, float b) {
  return ::fminf(a, b);
}
METAL_FUNC float fmax(float a, float b) {
  return ::fmaxf(a, b);
}
METAL_FUNC bool isnan(float x) {
  return x != x;
}
METAL_FUNC bool isinf(float x) {
  return ::fabsf(x) == INFINITY;
}
METAL_FUNC bool isfinite(float x) {
  return ::fabsf(x) < INFINITY;
}
METAL_FUNC bool signbit(float x) {
  return __float_as_int(x) < 0;
}

#define METAL_ORDER(T)         \
  METAL_FUNC T min(T a, T b) { \
    return b < a ? b : a;      \
  }                            \
  METAL_FUNC T max(T a, T b) { \
    return a < b ? b : a;      \
  }
METAL_ORDER(char)
METAL_ORDER(uchar)
METAL_ORDER(short)
METAL_ORDER(ushort)
METAL_ORDER(int)
METAL_ORDER(uint)
METAL_ORDER(long)
METAL_ORDER(ulong)
#define METAL_FLOAT_ORDER(T)               \
  METAL_FUNC T min(T a, T b) {             \
    return T(::fminf(float(a), float(b))); \
  }                                        \
  METAL_FUNC T max(T a, T b) {             \
    return T(::fmaxf(float(a), float(b))); \
  }                                        \
  METAL_FUNC T abs(T x) {                  \
    return T(::fabsf(float(x)));           \
  }
METAL_FLOAT_ORDER(float)
METAL_FLOAT_ORDER(half)
METAL_FLOAT_ORDER(bfloat)
METAL_FUNC int abs(int x) {
  return x < 0 ? -x : x;
}

template <class T>
METAL_FUNC T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
METAL_FUNC T select(T a, T b, bool condition) {
  return condition ? b : a;
}
template <class T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> condition) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = condition[i] ? b[i] : a[i];
  return a;
}
template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  _Pragma("unroll") for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <int N>
METAL_FUNC vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) c[i] = ::fmaf(a[i], b[i], c[i]);
  return c;
}
#define METAL_BY_ELEMENT(name)                                             \
  template <class T, int N>                                                \
  METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {                    \
    _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = name(a[i], b[i]); \
    return a;                                                              \
  }
METAL_BY_ELEMENT(min)
METAL_BY_ELEMENT(max)

METAL_FUNC uint popcount(uint x) {
  return __popc(x);
}
METAL_FUNC uint popcount(ulong x) {
  return __popcll(x);
}
METAL_FUNC uint ctz(uint x) {
  return x == 0 ? 32 : __ffs(x) - 1;
}

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
template <class T>
METAL_FUNC T atomic_load_explicit(const atomic<T>* a, memory_order) {
  return *const_cast<const volatile T*>(&a->value);
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(atomic<T>* a, U value, memory_order) {
  *const_cast<volatile T*>(&a->value) = T(value);
}
#define METAL_ATOMIC(name, function)                                           \
  template <class T, class U>                                                  \
  METAL_FUNC T atomic_##name##_explicit(atomic<T>* a, U value, memory_order) { \
    return function(&a->value, T(value));                                      \
  }
METAL_ATOMIC(fetch_add, ::atomicAdd)
METAL_ATOMIC(fetch_or, ::atomicOr)
}  // namespace metal
