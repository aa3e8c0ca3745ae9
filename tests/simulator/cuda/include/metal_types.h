// What Metal's library (msl/include) is made of in CUDA C++: type traits, scalar types, storage of vectors.
// half and bfloat store 16 bits; their arithmetic runs in float and is rounded after each operation, which
// gives what 16-bit arithmetic gives.
#pragma once

#define METAL_FUNC __forceinline__
#define MSL_INLINE METAL_FUNC
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#include "constants.h"

// Functions of CUDA that Metal's are made of.
#define MSL_C(name) ::name
#define MSL_RSQRT(x) ::rsqrtf(x)
#define MSL_POPCOUNT(x) (sizeof(x) > 4 ? __popcll(x) : __popc(uint(x)))
#define MSL_CTZ(x) ((sizeof(x) > 4 ? __ffsll(x) : __ffs(uint(x))) - 1)
#define MSL_LIMIT(T, value, bits) \
  __builtin_bit_cast(T, std::conditional_t < sizeof(T) == 4, uint, ushort > (bits))
#define MSL_EACH(i, N) _Pragma("unroll") for (int i = 0; i < N; ++i)

namespace std {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;

template <bool B, class A, class C>
struct conditional {
  typedef A type;
};
template <class A, class C>
struct conditional<false, A, C> {
  typedef C type;
};
template <bool B, class A, class C>
using conditional_t = typename conditional<B, A, C>::type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <class T>
struct remove_cv {
  typedef T type;
};
template <class T>
struct remove_cv<const T> : remove_cv<T> {};
template <class T>
struct remove_cv<volatile T> : remove_cv<T> {};
template <class T>
struct remove_cv<const volatile T> : remove_cv<T> {};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T, class... Types>
constexpr bool is_one_of = (is_same_v<remove_cv_t<T>, Types> || ...);
template <class T>
constexpr bool is_integral_v = is_one_of<T, bool, char, signed char, uchar, short, ushort, int, uint, long,
                                         ulong, long long, unsigned long long>;
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T>
constexpr bool is_signed_v = is_one_of<T, float, double> || (is_integral_v<T> && T(-1) < T(0));
template <class T>
constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
template <class T>
constexpr bool is_enum_v = __is_enum(T);

template <class From, class To>
constexpr bool is_convertible_v = __is_convertible_to(From, To);
}  // namespace std

namespace metal {
struct half;
struct bfloat;
}  // namespace metal
namespace msl {
using metal::bfloat;
using metal::half;
template <class T>
using if_number =
    std::enable_if_t<std::is_integral_v<T> || std::is_one_of<T, float, double, metal::half, metal::bfloat>>;
}  // namespace msl

namespace metal {
#define METAL_NARROW_FLOAT(Type, FROM_FLOAT, TO_FLOAT)  \
  struct Type {                                         \
    ushort bits;                                        \
    Type() = default;                                   \
    template <class T, class = msl::if_number<T>>       \
    METAL_FUNC Type(T value) {                          \
      const float wide = float(value);                  \
      asm(FROM_FLOAT : "=h"(bits) : "f"(wide));         \
    }                                                   \
    METAL_FUNC operator float() const {                 \
      float wide;                                       \
      TO_FLOAT;                                         \
      return wide;                                      \
    }                                                   \
    static constexpr Type of_bits(ushort bits) {        \
      Type result{};                                    \
      result.bits = bits;                               \
      return result;                                    \
    }                                                   \
    constexpr Type operator-() const {                  \
      return of_bits(ushort(bits ^ 0x8000));            \
    }                                                   \
    template <class T>                                  \
    METAL_FUNC Type& operator+=(T other) {              \
      return *this = Type(float(*this) + float(other)); \
    }                                                   \
    template <class T>                                  \
    METAL_FUNC Type& operator-=(T other) {              \
      return *this = Type(float(*this) - float(other)); \
    }                                                   \
    template <class T>                                  \
    METAL_FUNC Type& operator*=(T other) {              \
      return *this = Type(float(*this) * float(other)); \
    }                                                   \
    template <class T>                                  \
    METAL_FUNC Type& operator/=(T other) {              \
      return *this = Type(float(*this) / float(other)); \
    }                                                   \
  };

METAL_NARROW_FLOAT(half, "cvt.rn.f16.f32 %0, %1;", asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits)))
METAL_NARROW_FLOAT(bfloat, "cvt.rn.bf16.f32 %0, %1;", wide = __uint_as_float(uint(bits) << 16))

// Templates, so that half * float is float's operator.
#define METAL_NARROW_OPERATOR(op)                                               \
  template <class T, class = std::enable_if_t<std::is_one_of<T, half, bfloat>>> \
  METAL_FUNC T operator op(T a, T b) {                                          \
    return T(float(a) op float(b));                                             \
  }
METAL_NARROW_OPERATOR(+)
METAL_NARROW_OPERATOR(-)
METAL_NARROW_OPERATOR(*)
METAL_NARROW_OPERATOR(/)
}  // namespace metal

namespace msl {
template <class T, int N>
struct elements;
#define METAL_ELEMENTS(N, ALIGNMENT, ...)         \
  template <class T>                              \
  struct alignas(ALIGNMENT) elements<T, N> {      \
    T __VA_ARGS__;                                \
    METAL_FUNC T& operator[](int i) {             \
      return (&x)[i];                             \
    }                                             \
    METAL_FUNC const T& operator[](int i) const { \
      return (&x)[i];                             \
    }                                             \
  };
METAL_ELEMENTS(2, 2 * sizeof(T), x, y)
METAL_ELEMENTS(3, 4 * sizeof(T), x, y, z)
METAL_ELEMENTS(4, (sizeof(T) < 4 ? 4 * sizeof(T) : 16), x, y, z, w)
}  // namespace msl
