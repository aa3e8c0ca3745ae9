// vec<T, N> and packed vectors, for the executor and for CUDA: each defines their storage (msl_scalar.h).
// Swizzles are functions: the translator writes `.xy` as a call.
#pragma once
#ifndef __CUDACC_RTC__  // metal_types.h comes before
#include "msl_scalar.h"
#endif

namespace metal {
template <class T, int N>
struct vec;
}  // namespace metal

namespace msl {
using metal::vec;
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
template <class T, int N>
struct packed_vec;
template <class T, int N>
struct vector_product;
template <class A>
struct shape {
  static constexpr int size = is_scalar<A> || std::is_enum_v<A> ? 1 : 0;
};
template <class T, int N>
struct shape<vec<T, N>> {
  static constexpr int size = N;
};
template <class T, int N>
struct shape<packed_vec<T, N>> {
  static constexpr int size = N;
};
template <class T, int N>
struct shape<vector_product<T, N>> {
  static constexpr int size = N;
};
template <class A>
using if_scalar = std::enable_if_t<shape<A>::size == 1>;

template <class V, class A>
MSL_INLINE constexpr void append(V& to, int& at, const A& value) {
  if constexpr (shape<A>::size == 1) {
    to[at++] = static_cast<typename V::msl_component>(value);
  } else {
    MSL_EACH(i, shape<A>::size) to[at++] = static_cast<typename V::msl_component>(value[i]);
  }
}

template <int... I>
constexpr bool all_distinct() {
  unsigned seen = 0;
  bool distinct = true;
  ((distinct = distinct && !(seen >> I & 1), seen |= 1u << I), ...);
  return distinct;
}
// A swizzle on the left of an assignment.
template <class V, int... I>
struct assigned_swizzle {
  static_assert(all_distinct<I...>(), "a swizzle with a repeated component cannot be assigned to");
  typedef vec<typename V::msl_component, sizeof...(I)> value;
  V& of;
  MSL_INLINE void operator=(value from) {
    int k = 0;
    ((of[I] = from[k++]), ...);
  }
#define MSL_ASSIGNMENT(op)                               \
  template <class U>                                     \
  MSL_INLINE void operator op##=(const U& b) {           \
    *this = of.template msl_swizzle<I...>() op value(b); \
  }
  // clang-format off
  MSL_ASSIGNMENT(+) MSL_ASSIGNMENT(-) MSL_ASSIGNMENT(*) MSL_ASSIGNMENT(/) MSL_ASSIGNMENT(%)
  MSL_ASSIGNMENT(&) MSL_ASSIGNMENT(|) MSL_ASSIGNMENT(^)
  // clang-format on
};
}  // namespace msl

namespace metal {
#define MSL_ARITHMETIC(op)                              \
  friend MSL_INLINE vec operator op(vec a, vec b) {     \
    vec r;                                              \
    MSL_EACH(i, N) r[i] = static_cast<T>(a[i] op b[i]); \
    return r;                                           \
  }                                                     \
  MSL_ASSIGNED(op)
#define MSL_ASSIGNED(op)                        \
  template <class U>                            \
  MSL_INLINE vec& operator op##=(const U & b) { \
    return *this = *this op vec(b);             \
  }
#define MSL_OF_PRODUCT(op)                                             \
  MSL_INLINE vec& operator op##=(const msl::vector_product<T, N>& b) { \
    return *this = *this op b;                                         \
  }
#define MSL_COMPARISON(op)                                   \
  friend MSL_INLINE vec<bool, N> operator op(vec a, vec b) { \
    vec<bool, N> r;                                          \
    MSL_EACH(i, N) r[i] = a[i] op b[i];                      \
    return r;                                                \
  }
#define MSL_PREFIX(op, type)                          \
  friend MSL_INLINE vec<type, N> operator op(vec a) { \
    vec<type, N> r;                                   \
    MSL_EACH(i, N) r[i] = static_cast<type>(op a[i]); \
    return r;                                         \
  }
template <class T, int N>
struct vec : msl::elements<T, N> {
  typedef T msl_component;
  vec() = default;
  template <class A, class = msl::if_scalar<A>>
  MSL_INLINE vec(A value) {
    MSL_EACH(i, N)(*this)[i] = static_cast<T>(value);
  }
  template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>>
  MSL_INLINE explicit vec(vec<U, N> from) {
    MSL_EACH(i, N)(*this)[i] = static_cast<T>(from[i]);
  }
  template <class A, class B, class... More,
            class = std::enable_if_t<
                msl::shape<A>::size + msl::shape<B>::size + (msl::shape<More>::size + ... + 0) == N>>
  MSL_INLINE vec(A a, B b, More... more) {
    int at = 0;
    msl::append(*this, at, a);
    msl::append(*this, at, b);
    (msl::append(*this, at, more), ...);
  }
  template <int... I>
  MSL_INLINE vec<T, sizeof...(I)> msl_swizzle() const {
    static_assert(((I < N) && ...), "the vector has no such component");
    return vec<T, sizeof...(I)>((*this)[I]...);
  }
  template <int... I>
  MSL_INLINE msl::assigned_swizzle<vec, I...> msl_assigned() {
    static_assert(((I < N) && ...), "the vector has no such component");
    return {*this};
  }
  // clang-format off
  MSL_ARITHMETIC(+) MSL_ARITHMETIC(-) MSL_ARITHMETIC(/) MSL_ARITHMETIC(%) MSL_ASSIGNED(*)
  MSL_OF_PRODUCT(+) MSL_OF_PRODUCT(-)
  MSL_ARITHMETIC(&) MSL_ARITHMETIC(|) MSL_ARITHMETIC(^) MSL_ARITHMETIC(<<) MSL_ARITHMETIC(>>)
  MSL_COMPARISON(==) MSL_COMPARISON(!=) MSL_COMPARISON(<) MSL_COMPARISON(>)
  MSL_COMPARISON(<=) MSL_COMPARISON(>=) MSL_COMPARISON(&&) MSL_COMPARISON(||)
  MSL_PREFIX(-, T) MSL_PREFIX(+, T) MSL_PREFIX(~, T) MSL_PREFIX(!, bool)
      // clang-format on
      friend MSL_INLINE msl::vector_product<T, N>
      operator*(vec a, vec b) {
    vec r;
    MSL_EACH(i, N) r[i] = static_cast<T>(a[i] * b[i]);
    return {r, a, b};
  }
  MSL_INLINE vec& operator++() { return *this += T(1); }
  MSL_INLINE vec& operator--() { return *this -= T(1); }
  MSL_INLINE vec operator++(int) {
    vec old = *this;
    *this += T(1);
    return old;
  }
  MSL_INLINE vec operator--(int) {
    vec old = *this;
    *this -= T(1);
    return old;
  }
};
}  // namespace metal

namespace msl {
// A product that knows its factors: a sum in the same expression is contracted as one of scalars is.
template <class T, int N>
struct vector_product : vec<T, N> {
  vec<T, N> a, b;
#define MSL_CONTRACTED(op)                                                      \
  friend MSL_INLINE vec<T, N> operator op(vector_product x, vec<T, N> y) {      \
    vec<T, N> r;                                                                \
    MSL_EACH(i, N) r[i] = static_cast<T>(x.a[i] * x.b[i] op y[i]);              \
    return r;                                                                   \
  }                                                                             \
  friend MSL_INLINE vec<T, N> operator op(vec<T, N> x, vector_product y) {      \
    vec<T, N> r;                                                                \
    MSL_EACH(i, N) r[i] = static_cast<T>(x[i] op y.a[i] * y.b[i]);              \
    return r;                                                                   \
  }                                                                             \
  friend MSL_INLINE vec<T, N> operator op(vector_product x, vector_product y) { \
    return x op static_cast<vec<T, N>>(y);                                      \
  }
  MSL_CONTRACTED(+)
  MSL_CONTRACTED(-)
};

template <class T, int N>
struct packed_elements;
template <class T>
struct packed_elements<T, 2> {
  T x, y;
};
template <class T>
struct packed_elements<T, 3> {
  T x, y, z;
};
template <class T>
struct packed_elements<T, 4> {
  T x, y, z, w;
};
// packed_float3 and its like: no padding, aligned as one component, used through conversion to vec.
template <class T, int N>
struct packed_vec : packed_elements<T, N> {
  packed_vec() = default;
  MSL_INLINE packed_vec(vec<T, N> from) { MSL_EACH(i, N)(*this)[i] = from[i]; }
  template <class A, class = if_scalar<A>>
  MSL_INLINE packed_vec(A value) : packed_vec(vec<T, N>(value)) {}
  template <class A, class B, class... More>
  MSL_INLINE packed_vec(A a, B b, More... more) : packed_vec(vec<T, N>(a, b, more...)) {}
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> to;
    MSL_EACH(i, N) to[i] = (*this)[i];
    return to;
  }
  template <class I>
  MSL_INLINE T& operator[](I i) {
    return (&this->x)[i];
  }
  template <class I>
  MSL_INLINE const T& operator[](I i) const {
    return (&this->x)[i];
  }
  template <int... I>
  MSL_INLINE vec<T, sizeof...(I)> msl_swizzle() const {
    return vec<T, N>(*this).template msl_swizzle<I...>();
  }
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

// float2, packed_float2 and so on, in the namespaces of both.
// clang-format off
#define MSL_NAMED(T)                                                      \
  typedef metal::vec<T, 2> T##2;                                          \
  typedef metal::vec<T, 3> T##3;                                          \
  typedef metal::vec<T, 4> T##4;                                          \
  typedef msl::packed_vec<T, 2> packed_##T##2;                            \
  typedef msl::packed_vec<T, 3> packed_##T##3;                            \
  typedef msl::packed_vec<T, 4> packed_##T##4;
// clang-format on
#define MSL_NAMED_ALL \
  MSL_NAMED(char)     \
  MSL_NAMED(uchar)    \
  MSL_NAMED(short)    \
  MSL_NAMED(ushort)   \
  MSL_NAMED(int)      \
  MSL_NAMED(uint)     \
  MSL_NAMED(long)     \
  MSL_NAMED(ulong)    \
  MSL_NAMED(half)     \
  MSL_NAMED(bfloat)   \
  MSL_NAMED(float)    \
  MSL_NAMED(bool)
#ifndef __CUDACC_RTC__  // where the global names are CUDA's
MSL_NAMED_ALL
#endif
namespace metal {
MSL_NAMED_ALL
}
