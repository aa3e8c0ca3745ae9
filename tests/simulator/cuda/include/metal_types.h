// Metal's scalar types and type traits in CUDA C++. half and bfloat store 16 bits; their arithmetic runs in
// float and is rounded after each operation, which gives what 16-bit arithmetic gives.
#pragma once

#define METAL_FUNC __forceinline__
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#define M_LOG2E_F 1.44269504f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define INT_MAX 2147483647

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

namespace metal {
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
template <class T>
using remove_addrspace_t = T;

template <class T, class... Types>
constexpr bool is_one_of = (is_same_v<remove_cv_t<T>, Types> || ...);
template <class T>
constexpr bool is_integral_v = is_one_of<T, bool, char, signed char, uchar, short, ushort, int, uint, long,
                                         ulong, long long, unsigned long long>;
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};

template <class From, class To>
constexpr bool is_convertible_v = __is_convertible_to(From, To);

struct half;
struct bfloat;
template <class T>
constexpr bool is_floating_point_v = is_one_of<T, float, half, bfloat>;
template <class T>
constexpr bool is_number_v = is_integral_v<T> || is_floating_point_v<T> || is_same_v<remove_cv_t<T>, double>;
template <class T>
using if_number = enable_if_t<is_number_v<T>>;

#define METAL_NARROW_FLOAT(Type, FROM_FLOAT, TO_FLOAT)  \
  struct Type {                                         \
    ushort bits;                                        \
    Type() = default;                                   \
    template <class T, class = if_number<T>>            \
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
#define METAL_NARROW_OPERATOR(op)                                     \
  template <class T, class = enable_if_t<is_one_of<T, half, bfloat>>> \
  METAL_FUNC T operator op(T a, T b) {                                \
    return T(float(a) op float(b));                                   \
  }
METAL_NARROW_OPERATOR(+)
METAL_NARROW_OPERATOR(-)
METAL_NARROW_OPERATOR(*)
METAL_NARROW_OPERATOR(/)

template <class T>
struct numeric_limits {
  static constexpr T max() { return T(-1) < T(0) ? T((1ul << (8 * sizeof(T) - 1)) - 1) : T(-1); }
  static constexpr T min() { return T(-1) < T(0) ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
#define METAL_LIMITS(Type, MAKE, LARGEST, SMALLEST, INFINITE, NOT_NUMBER) \
  template <>                                                             \
  struct numeric_limits<Type> {                                           \
    static constexpr Type max() {                                         \
      return MAKE(LARGEST);                                               \
    }                                                                     \
    static constexpr Type lowest() {                                      \
      return -max();                                                      \
    }                                                                     \
    static constexpr Type min() {                                         \
      return MAKE(SMALLEST);                                              \
    }                                                                     \
    static constexpr Type infinity() {                                    \
      return MAKE(INFINITE);                                              \
    }                                                                     \
    static constexpr Type quiet_NaN() {                                   \
      return MAKE(NOT_NUMBER);                                            \
    }                                                                     \
  };
METAL_LIMITS(float, float, FLT_MAX, FLT_MIN, INFINITY, NAN)
METAL_LIMITS(half, half::of_bits, 0x7bff, 0x0400, 0x7c00, 0x7e00)
METAL_LIMITS(bfloat, bfloat::of_bits, 0x7f7f, 0x0080, 0x7f80, 0x7fc0)
}  // namespace metal

template <class To, class From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
