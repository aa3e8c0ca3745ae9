// The executor's own for msl_vector.h and msl_math.h: scalar types, the storage of a vector, C's functions.
#pragma once
#include <type_traits>

#include "msl_runtime.h"
//
#include "constants.h"

typedef _Float16 half;
typedef __bf16 bfloat;

#define MSL_C(name) __builtin_##name
#define MSL_RSQRT(x) float(1.0 / __builtin_sqrt(double(x)))
#define MSL_POPCOUNT(x) __builtin_popcountl(x)
#define MSL_CTZ(x) __builtin_ctzl(x)
#define MSL_EACH(i, N) for (int i = 0; i < N; i++)

namespace msl {
// Storage of a vector: three components occupy the room of four; bool is a byte each. Over 16 bytes it is an
// array, as the instrumentation does not see loads and stores wider than that.
template <class T, int N, bool = (N * sizeof(T) > 16 || (N == 3 && sizeof(T) == 8))>
struct storage {
  typedef T type __attribute__((ext_vector_type(N == 3 ? 4 : N)));
};
template <int N>
struct storage<bool, N, false> {
  typedef uchar type __attribute__((ext_vector_type(N == 3 ? 4 : N)));
};
template <class T, int N>
struct storage<T, N, true> {
  struct alignas(32) type {
    T values[N == 3 ? 4 : N];
  };
};

// Components are properties, so that a vector is passed on as the clang vector that it stores.
#define MSL_COMPONENT(name, i)              \
  MSL_INLINE T msl_get_##name() const {     \
    return (*this)[i];                      \
  }                                         \
  MSL_INLINE void msl_put_##name(T value) { \
    (*this)[i] = value;                     \
  }                                         \
  __declspec(property(get = msl_get_##name, put = msl_put_##name)) T name;
#define MSL_ELEMENTS(N, COMPONENTS)                               \
  template <class T>                                              \
  struct elements<T, N> {                                         \
    typename storage<T, N>::type v;                               \
    template <class I>                                            \
    MSL_INLINE T& operator[](I i) {                               \
      return reinterpret_cast<T*>(&v)[static_cast<int>(i)];       \
    }                                                             \
    template <class I>                                            \
    MSL_INLINE const T& operator[](I i) const {                   \
      return reinterpret_cast<const T*>(&v)[static_cast<int>(i)]; \
    }                                                             \
    COMPONENTS                                                    \
  };
template <class T, int N>
struct elements;
// clang-format off
#define MSL_NAMES2 MSL_COMPONENT(x, 0) MSL_COMPONENT(y, 1) MSL_COMPONENT(r, 0) MSL_COMPONENT(g, 1)
#define MSL_NAMES3 MSL_NAMES2 MSL_COMPONENT(z, 2) MSL_COMPONENT(b, 2)
#define MSL_NAMES4 MSL_NAMES3 MSL_COMPONENT(w, 3) MSL_COMPONENT(a, 3)
MSL_ELEMENTS(2, MSL_NAMES2)
MSL_ELEMENTS(3, MSL_NAMES3)
MSL_ELEMENTS(4, MSL_NAMES4)
// clang-format on
}  // namespace msl
