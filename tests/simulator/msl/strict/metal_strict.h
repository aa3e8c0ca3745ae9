// Declarations of Metal's library for clang's OpenCL C++ front end, which has real address spaces. Only
// checked, never run: overload resolution is that of the executor's metal_stdlib, here the address spaces
// matter.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#include "constants.h"

typedef ulong size_t;
typedef long ptrdiff_t;
typedef __bf16 bfloat;

// device and constant are spaces of their own, neither of which converts to the other, to thread or to
// threadgroup. OpenCL's own constant space would do for constant, but structures could not be copied from it,
// as they can in Metal.
#define STRICT_DEVICE __attribute__((opencl_global_device))
#define STRICT_CONSTANT_SPACE const __attribute__((opencl_global_host))

// Attributes of a program-scope variable in the constant address space, as every static member must be.
#define STRICT_CONSTANT static constexpr __constant

namespace metal {

template <class T, T V>
struct integral_constant {
  STRICT_CONSTANT T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool V>
using bool_constant = integral_constant<bool, V>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool, class A, class B>
struct conditional {
  typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool C, class A, class B>
using conditional_t = typename conditional<C, A, B>::type;
template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
struct remove_addrspace<__private T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<STRICT_DEVICE T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__attribute__((opencl_global_host)) T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__local T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__constant T> {
  typedef T type;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T>
using remove_cv_t = __remove_cv(T);
template <class A, class B>
STRICT_CONSTANT bool strict_same = __is_same(A, B);
template <class T>
STRICT_CONSTANT bool strict_float = strict_same<__remove_cv(T), float> || strict_same<__remove_cv(T), half> ||
                                    strict_same<__remove_cv(T), bfloat>;
#define STRICT_TRAIT(name, ...)                \
  template <class T>                           \
  struct name : bool_constant<__VA_ARGS__> {}; \
  template <class T>                           \
  constexpr __constant bool name##_v = __VA_ARGS__;
// clang-format off
STRICT_TRAIT(is_integral, __is_integral(T))
STRICT_TRAIT(is_floating_point, strict_float<T>)
// clang-format on

template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
constexpr __constant bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B>
constexpr __constant bool is_convertible_v = __is_convertible(A, B);

template <class T>
struct strict_component {
  typedef T type;
};
template <>
struct strict_component<bool> {
  typedef int type;
};
template <class T, int N>
using vec = typename strict_component<T>::type __attribute__((ext_vector_type(N)));

template <class T>
struct strict_result {
  typedef T type;
};
template <>
struct strict_result<bfloat> {
  typedef float type;
};
template <class T>
using strict_result_t = typename strict_result<T>::type;
template <class T>
T strict_value();
template <class A, class B>
using strict_common_t = strict_result_t<decltype(strict_value<A>() + strict_value<B>())>;
}  // namespace metal

// T(a, b, ...) of a vector type: rewritten to this by the check.
template <class T, class... A>
T strict_make(A...);
template <class To, class From>
To as_type(From);

#define STRICT_VECTOR(T, N)      \
  typedef metal::vec<T, N> T##N; \
  namespace metal {              \
  using ::T##N;                  \
  }
#define STRICT_PACKED(T, N, MORE) \
  struct packed_##T##N {          \
    T x, y MORE;                  \
    packed_##T##N() = default;    \
    packed_##T##N(T##N);          \
    operator T##N() const;        \
    void operator=(T##N);         \
  };
// clang-format off
#define STRICT_COMMA ,
#define STRICT_VECTORS(T)                                                            \
  STRICT_VECTOR(T, 2) STRICT_VECTOR(T, 3) STRICT_VECTOR(T, 4)                        \
  STRICT_PACKED(T, 2, ) STRICT_PACKED(T, 3, STRICT_COMMA z)                          \
  STRICT_PACKED(T, 4, STRICT_COMMA z STRICT_COMMA w)
STRICT_VECTORS(char)
STRICT_VECTORS(uchar)
STRICT_VECTORS(short)
STRICT_VECTORS(ushort)
STRICT_VECTORS(int)
STRICT_VECTORS(uint)
STRICT_VECTORS(long)
STRICT_VECTORS(ulong)
STRICT_VECTORS(half)
STRICT_VECTORS(bfloat)
STRICT_VECTORS(float)
STRICT_VECTOR(bool, 2)
STRICT_VECTOR(bool, 3)
STRICT_VECTOR(bool, 4)
// clang-format on

namespace metal {
#define STRICT_1(name) \
  template <class T>   \
  strict_result_t<T> name(T);
#define STRICT_2(name)        \
  template <class A, class B> \
  strict_common_t<A, B> name(A, B);
#define STRICT_3(name)                 \
  template <class A, class B, class C> \
  strict_common_t<strict_common_t<A, B>, C> name(A, B, C);
#define STRICT_TEST(name) \
  template <class T>      \
  bool name(T);
// clang-format off
STRICT_1(normalize) STRICT_2(cross) STRICT_2(nextafter) STRICT_TEST(all) STRICT_TEST(any)
// clang-format on
#define MSL_FLOAT1(name, ...) STRICT_1(name)
#define MSL_FLOAT2(name, ...) STRICT_2(name)
#define MSL_FLOAT3(name, ...) STRICT_3(name)
#define MSL_TEST1(name, ...) STRICT_TEST(name)
#define MSL_INTEGERS1(name, ...) STRICT_1(name)
#define MSL_INTEGERS2(name, ...) STRICT_2(name)
#define MSL_INTEGERS3(name, ...) STRICT_3(name)
#define MSL_VECTOR1(name)
#include "functions.h"
    template <class A, class B, class C>
    strict_common_t<A, B> select(A, B, C);
template <class T>
T ldexp(T, int);
template <class T>
T frexp(T, int&);
#define STRICT_GEOMETRY(N)                               \
  float dot(metal::vec<float, N>, metal::vec<float, N>); \
  half dot(metal::vec<half, N>, metal::vec<half, N>);    \
  float length(metal::vec<float, N>);                    \
  float distance(metal::vec<float, N>, metal::vec<float, N>);
// clang-format off
STRICT_GEOMETRY(2)
STRICT_GEOMETRY(3)
STRICT_GEOMETRY(4)
// clang-format on

#include "numeric_limits.h"

void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T>
struct atomic {
  T value;
};
// OpenCL has types of these names, which are no structures.
#define atomic_int strict_atomic_int
#define atomic_uint strict_atomic_uint
#define atomic_float strict_atomic_float
#define atomic_ulong strict_atomic_ulong
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
template <class T>
struct strict_identity {
  typedef T type;
};
#define STRICT_ATOMIC(name)                                                                   \
  template <class T>                                                                          \
  T name(volatile STRICT_DEVICE atomic<T>*, typename strict_identity<T>::type, memory_order); \
  template <class T>                                                                          \
  T name(volatile __local atomic<T>*, typename strict_identity<T>::type, memory_order);
// clang-format off
STRICT_ATOMIC(atomic_fetch_add_explicit)
STRICT_ATOMIC(atomic_fetch_and_explicit)
STRICT_ATOMIC(atomic_fetch_or_explicit)
STRICT_ATOMIC(atomic_fetch_min_explicit)
STRICT_ATOMIC(atomic_fetch_max_explicit)
STRICT_ATOMIC(atomic_store_explicit)
// clang-format on

#define STRICT_ATOMIC_SPACE(space)                                          \
  template <class T>                                                        \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);    \
  template <class T>                                                        \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, T*, \
                                             typename strict_identity<T>::type, memory_order, memory_order);
STRICT_ATOMIC_SPACE(STRICT_DEVICE)
STRICT_ATOMIC_SPACE(__local)

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit simd_vote(vote_t = 0);
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
typedef simd_vote quad_vote;
// clang-format off
#define STRICT_GROUP_LISTS(p) \
  STRICT_1(p##_sum) STRICT_1(p##_product) STRICT_1(p##_min) STRICT_1(p##_max) STRICT_1(p##_and)      \
  STRICT_1(p##_or) STRICT_1(p##_xor) STRICT_1(p##_broadcast_first) STRICT_LANE(p##_shuffle)          \
  STRICT_LANE(p##_shuffle_up) STRICT_LANE(p##_shuffle_down) STRICT_LANE(p##_shuffle_xor)             \
  STRICT_LANE(p##_shuffle_rotate_up) STRICT_LANE(p##_shuffle_rotate_down) STRICT_LANE(p##_broadcast) \
  STRICT_FILL(p##_shuffle_and_fill_up) STRICT_FILL(p##_shuffle_and_fill_down)
// clang-format on
#define STRICT_GROUP(p)      \
  bool p##_any(bool);        \
  bool p##_all(bool);        \
  bool p##_is_first();       \
  p##_vote p##_ballot(bool); \
  p##_vote p##_active_threads_mask();
#define STRICT_LANE(name) \
  template <class T>      \
  strict_result_t<T> name(T, ushort);
#define STRICT_FILL(name) \
  template <class T>      \
  T name(T, typename strict_identity<T>::type, ushort, ushort = 32);
// clang-format off
STRICT_GROUP_LISTS(simd)
STRICT_GROUP_LISTS(quad)
STRICT_GROUP(simd)
STRICT_GROUP(quad)
STRICT_1(simd_prefix_inclusive_sum) STRICT_1(simd_prefix_exclusive_sum)
STRICT_1(simd_prefix_inclusive_product) STRICT_1(simd_prefix_exclusive_product)
    // clang-format on

    template <class T, int Columns, int Rows>
    struct simdgroup_matrix {
  typedef vec<T, Columns * Rows> storage_type;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>, "no matrix of this type");
  __private storage_type& thread_elements() __private;
  const __private storage_type& thread_elements() const __private;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);
#define STRICT_MATRIX_MEMORY(space)                                                                     \
  template <class T>                                                                                    \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, bool = false); \
  template <class T>                                                                                    \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = 0, bool = false);
STRICT_MATRIX_MEMORY(STRICT_DEVICE)
STRICT_MATRIX_MEMORY(__local)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

template <class T, size_t N>
struct array {
  T values[N];
  T& operator[](size_t) __private;
  const T& operator[](size_t) const;
  const __constant T& operator[](size_t) const __constant;
  __global T& operator[](size_t) __global;
  __local T& operator[](size_t) __local;
  static constexpr size_t size() { return N; }
};
}  // namespace metal
