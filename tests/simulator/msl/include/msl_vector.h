// Scalar types and vec<T, N>. A vector stores a clang vector (size, alignment and arithmetic of Metal) and
// offers components and swizzles as properties.
#pragma once
#include <type_traits>

#include "msl_runtime.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace msl {
template <class T>
inline constexpr bool is_float =
    std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
inline constexpr bool is_int = std::is_integral_v<T> && !std::is_same_v<T, bool>;
template <class T>
inline constexpr bool is_scalar = is_float<T> || std::is_integral_v<T> || std::is_same_v<T, double>;
template <class T>
struct identity {
  typedef T type;
};
template <class T>
using identity_t = typename identity<T>::type;
template <int... I>
constexpr bool all_distinct() {
  unsigned seen = 0;
  bool distinct = true;
  ((distinct = distinct && !(seen >> I & 1), seen |= 1u << I), ...);
  return distinct;
}
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
}  // namespace msl

namespace metal {
template <class T, int N>
struct vec;
}  // namespace metal

namespace msl {
template <class T, int N>
struct packed_vec;
template <class A>
struct shape {
  static constexpr int size = is_scalar<A> || std::is_enum_v<A> ? 1 : 0;
};
template <class T, int N>
struct shape<metal::vec<T, N>> {
  static constexpr int size = N;
};
template <class T, int N>
struct shape<packed_vec<T, N>> {
  static constexpr int size = N;
};

template <class T, class A>
MSL_INLINE constexpr void append(T* to, int& at, const A& value) {
  if constexpr (shape<A>::size == 1) {
    to[at++] = static_cast<T>(value);
  } else {
    for (int i = 0; i < shape<A>::size; i++) to[at++] = static_cast<T>(value.msl_element(i));
  }
}
}  // namespace msl

// One named swizzle, e.g. MSL_SWIZZLE(2, xy, x, y). build.py generates the lists.
#define MSL_SWIZZLE(count, name, ...)                  \
  MSL_INLINE vec<T, count> msl_get_##name() const {    \
    return this->template swizzle<__VA_ARGS__>();      \
  }                                                    \
  MSL_INLINE void msl_put_##name(vec<T, count> from) { \
    this->template assign<__VA_ARGS__>(from);          \
  }                                                    \
  __declspec(property(get = msl_get_##name, put = msl_put_##name)) vec<T, count> name;
#define MSL_COMPONENT(name, i)              \
  MSL_INLINE T msl_get_##name() const {     \
    return this->msl_element(i);            \
  }                                         \
  MSL_INLINE void msl_put_##name(T value) { \
    this->msl_element(i) = value;           \
  }                                         \
  __declspec(property(get = msl_get_##name, put = msl_put_##name)) T name;

namespace msl {
template <class T, int N>
struct vector_memory {
  typename storage<T, N>::type v;
  vector_memory() = default;
  MSL_INLINE T& msl_element(int i) { return reinterpret_cast<T*>(&v)[i]; }
  MSL_INLINE const T& msl_element(int i) const { return reinterpret_cast<const T*>(&v)[i]; }
  template <class I>
  MSL_INLINE T& operator[](I i) {
    return msl_element(static_cast<int>(i));
  }
  template <class I>
  MSL_INLINE const T& operator[](I i) const {
    return msl_element(static_cast<int>(i));
  }
  template <int... I>
  MSL_INLINE metal::vec<T, sizeof...(I)> swizzle() const {
    return metal::vec<T, sizeof...(I)>(msl_element(I)...);
  }
  template <int... I>
  MSL_INLINE void assign(metal::vec<T, sizeof...(I)> from) {
    static_assert(all_distinct<I...>(), "a swizzle with a repeated component cannot be assigned to");
    int k = 0;
    ((msl_element(I) = from.msl_element(k++)), ...);
  }
};
}  // namespace msl

namespace metal {
// clang-format off
#define MSL_VECTOR(N, COMPONENTS) \
  template <class T> struct vec<T, N> : msl::vector_memory<T, N> { \
    vec() = default; \
    template <class A, class = std::enable_if_t<msl::shape<A>::size == 1>> MSL_INLINE vec(A value) { \
      for (int i = 0; i < N; i++) this->msl_element(i) = static_cast<T>(value); \
    } \
    template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>> \
    MSL_INLINE explicit vec(vec<U, N> from) { \
      for (int i = 0; i < N; i++) this->msl_element(i) = static_cast<T>(from.msl_element(i)); \
    } \
    template <class A, class B, class... More, \
              class = std::enable_if_t<msl::shape<A>::size + msl::shape<B>::size + \
                                           (msl::shape<More>::size + ... + 0) == N>> \
    MSL_INLINE vec(A a, B b, More... more) { \
      int at = 0; \
      T* to = &this->msl_element(0); \
      msl::append(to, at, a); \
      msl::append(to, at, b); \
      (msl::append(to, at, more), ...); \
    } \
    COMPONENTS \
    MSL_BINARY_OPERATORS(N) \
    MSL_INCREMENTS \
  };
// clang-format on

#define MSL_ARITHMETIC(op, N)                                                                            \
  friend MSL_INLINE vec operator op(vec a, vec b) {                                                      \
    vec r;                                                                                               \
    for (int i = 0; i < N; i++) r.msl_element(i) = static_cast<T>(a.msl_element(i) op b.msl_element(i)); \
    return r;                                                                                            \
  }                                                                                                      \
  template <class U>                                                                                     \
  MSL_INLINE vec& operator op##=(const U & b) {                                                          \
    return *this = *this op vec(b);                                                                      \
  }
#define MSL_COMPARISON(op, N)                                                            \
  friend MSL_INLINE vec<bool, N> operator op(vec a, vec b) {                             \
    vec<bool, N> r;                                                                      \
    for (int i = 0; i < N; i++) r.msl_element(i) = a.msl_element(i) op b.msl_element(i); \
    return r;                                                                            \
  }
#define MSL_PREFIX(op, N, type)                                                            \
  friend MSL_INLINE vec<type, N> operator op(vec a) {                                      \
    vec<type, N> r;                                                                        \
    for (int i = 0; i < N; i++) r.msl_element(i) = static_cast<type>(op a.msl_element(i)); \
    return r;                                                                              \
  }
// clang-format off
#define MSL_BINARY_OPERATORS(N)                                                                        \
  MSL_ARITHMETIC(+, N) MSL_ARITHMETIC(-, N) MSL_ARITHMETIC(*, N) MSL_ARITHMETIC(/, N)                  \
  MSL_ARITHMETIC(%, N) MSL_ARITHMETIC(&, N) MSL_ARITHMETIC(|, N) MSL_ARITHMETIC(^, N)                  \
  MSL_ARITHMETIC(<<, N) MSL_ARITHMETIC(>>, N)                                                          \
  MSL_COMPARISON(==, N) MSL_COMPARISON(!=, N) MSL_COMPARISON(<, N) MSL_COMPARISON(>, N)                \
  MSL_COMPARISON(<=, N) MSL_COMPARISON(>=, N) MSL_COMPARISON(&&, N) MSL_COMPARISON(||, N)              \
  MSL_PREFIX(-, N, T) MSL_PREFIX(+, N, T) MSL_PREFIX(~, N, T) MSL_PREFIX(!, N, bool)
// clang-format on
#define MSL_INCREMENTS             \
  MSL_INLINE vec& operator++() {   \
    return *this += T(1);          \
  }                                \
  MSL_INLINE vec& operator--() {   \
    return *this -= T(1);          \
  }                                \
  MSL_INLINE vec operator++(int) { \
    vec old = *this;               \
    *this += T(1);                 \
    return old;                    \
  }                                \
  MSL_INLINE vec operator--(int) { \
    vec old = *this;               \
    *this -= T(1);                 \
    return old;                    \
  }

// clang-format off
#define MSL_NAMES2 MSL_COMPONENT(x, 0) MSL_COMPONENT(y, 1) MSL_COMPONENT(r, 0) MSL_COMPONENT(g, 1)
#define MSL_NAMES3 MSL_NAMES2 MSL_COMPONENT(z, 2) MSL_COMPONENT(b, 2)
#define MSL_NAMES4 MSL_NAMES3 MSL_COMPONENT(w, 3) MSL_COMPONENT(a, 3)
// clang-format on
#include "msl_swizzles.h"
MSL_VECTOR(2, MSL_NAMES2 MSL_SWIZZLES2)
MSL_VECTOR(3, MSL_NAMES3 MSL_SWIZZLES3)
MSL_VECTOR(4, MSL_NAMES4 MSL_SWIZZLES4)

}  // namespace metal

namespace msl {
using metal::vec;
// packed_float3 and its like: no padding, aligned as one component, used through conversion to vec.
template <class T, int N>
struct packed_vec {
  T values[N];
  packed_vec() = default;
  MSL_INLINE packed_vec(vec<T, N> from) {
    for (int i = 0; i < N; i++) values[i] = from.msl_element(i);
  }
  template <class A, class = std::enable_if_t<msl::shape<A>::size == 1>>
  MSL_INLINE packed_vec(A value) : packed_vec(vec<T, N>(value)) {}
  template <class A, class B, class... More>
  MSL_INLINE packed_vec(A a, B b, More... more) : packed_vec(vec<T, N>(a, b, more...)) {}
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> to;
    for (int i = 0; i < N; i++) to.msl_element(i) = values[i];
    return to;
  }
  MSL_INLINE T& msl_element(int i) { return values[i]; }
  MSL_INLINE const T& msl_element(int i) const { return values[i]; }
  template <class I>
  MSL_INLINE T& operator[](I i) {
    return values[i];
  }
  template <class I>
  MSL_INLINE const T& operator[](I i) const {
    return values[i];
  }
  // clang-format off
  MSL_COMPONENT(x, 0)
  MSL_COMPONENT(y, 1)
  // clang-format on
  template <int M = N, class = std::enable_if_t<(M > 2)>>
  MSL_INLINE T msl_get_z() const {
    return values[2];
  }
  template <int M = N, class = std::enable_if_t<(M > 2)>>
  MSL_INLINE void msl_put_z(T value) {
    values[2] = value;
  }
  __declspec(property(get = msl_get_z, put = msl_put_z)) T z;
  template <int M = N, class = std::enable_if_t<(M > 3)>>
  MSL_INLINE T msl_get_w() const {
    return values[3];
  }
  template <int M = N, class = std::enable_if_t<(M > 3)>>
  MSL_INLINE void msl_put_w(T value) {
    values[3] = value;
  }
  __declspec(property(get = msl_get_w, put = msl_put_w)) T w;
#define MSL_PACKED(op)                                                                                \
  friend MSL_INLINE vec<T, N> operator op(packed_vec a, packed_vec b) {                               \
    return vec<T, N>(a) op vec<T, N>(b);                                                              \
  }                                                                                                   \
  friend MSL_INLINE vec<T, N> operator op(packed_vec a, vec<T, N> b) { return vec<T, N>(a) op b; }    \
  friend MSL_INLINE vec<T, N> operator op(vec<T, N> a, packed_vec b) { return a op vec<T, N>(b); }    \
  friend MSL_INLINE vec<T, N> operator op(packed_vec a, T b) { return vec<T, N>(a) op vec<T, N>(b); } \
  friend MSL_INLINE vec<T, N> operator op(T a, packed_vec b) { return vec<T, N>(a) op vec<T, N>(b); } \
  template <class U>                                                                                  \
  MSL_INLINE packed_vec& operator op##=(const U & b) {                                                \
    return *this = vec<T, N>(*this) op vec<T, N>(b);                                                  \
  }
  // clang-format off
  MSL_PACKED(+) MSL_PACKED(-) MSL_PACKED(*) MSL_PACKED(/)
  // clang-format on
};
}  // namespace msl

#define MSL_NAMED(T, N)                        \
  typedef metal::vec<T, N> T##N;               \
  typedef msl::packed_vec<T, N> packed_##T##N; \
  namespace metal {                            \
  using ::T##N;                                \
  using ::packed_##T##N;                       \
  }
// clang-format off
#define MSL_NAMED_ALL(T) MSL_NAMED(T, 2) MSL_NAMED(T, 3) MSL_NAMED(T, 4)
MSL_NAMED_ALL(char)
MSL_NAMED_ALL(uchar)
MSL_NAMED_ALL(short)
MSL_NAMED_ALL(ushort)
MSL_NAMED_ALL(int)
MSL_NAMED_ALL(uint)
MSL_NAMED_ALL(long)
MSL_NAMED_ALL(ulong)
MSL_NAMED_ALL(half)
MSL_NAMED_ALL(bfloat)
MSL_NAMED_ALL(float)
MSL_NAMED_ALL(bool)
// clang-format on
