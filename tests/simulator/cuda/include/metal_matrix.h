// simdgroup_matrix on the tensor cores. A lane holds two neighbouring columns of a row, in the layout of
// Apple's GPUs; metal_simd.h numbers the lanes so that warp thread t has row t / 4 and columns 2 (t % 4) and
// 2 (t % 4) + 1, the tensor cores' own layout of A and of the sums. B is transposed on the way.
//
// The instruction has 16 rows, of which the last 8 stay empty: products are not joined to fill them.
#pragma once
#include "metal_simd.h"

namespace metal {
template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    const uint row = warp_thread() / 4, column = warp_thread() % 4 * 2;
    elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
};

template <class T, int Columns, int Rows, class U>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(U value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>(T(value));
  return m;
}

// A volatile comment: it stands in the PTX of every kernel that uses matrices.
METAL_FUNC void mark_matrix() {
  asm volatile("// simdgroup_matrix");
}

// An 8x8 matrix of 16-bit elements, transposed.
METAL_FUNC uint transposed(uint pair) {
  uint result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
METAL_FUNC uint pair_bits(ushort low, ushort high) {
  return uint(low) | uint(high) << 16;
}

// sums += a b. Rows 8 to 15 of the left operand are zeros, and so are their sums.
#define METAL_PRODUCT(Type, NAME)                                                 \
  METAL_FUNC void multiply(vec<float, 2>& sums, vec<Type, 2> a, vec<Type, 2> b) { \
    float lower0 = 0.0f, lower1 = 0.0f;                                           \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"       \
                 : "+f"(sums.x), "+f"(sums.y), "+f"(lower0), "+f"(lower1)         \
                 : "r"(pair_bits(a.x.bits, a.y.bits)), "r"(0),                    \
                   "r"(transposed(pair_bits(b.x.bits, b.y.bits))));               \
  }
METAL_PRODUCT(half, "f16")
METAL_PRODUCT(bfloat, "bf16")

// What tf32 keeps of a float.
METAL_FUNC vec<float, 2> upper_bits(vec<float, 2> a) {
  return vec<float, 2>(__uint_as_float(__float_as_uint(a.x) & ~0x1fffu),
                       __uint_as_float(__float_as_uint(a.y) & ~0x1fffu));
}
// Which columns of a meet which rows of b is free, if both agree: thread t's first and second element stand
// for k = t and k = t + 4 of the instruction.
METAL_FUNC void multiply_tf32(vec<float, 2>& sums, vec<float, 2> a, vec<float, 2> b) {
  const uint x = __float_as_uint(b.x), y = __float_as_uint(b.y);
  const uint low = transposed(pair_bits(ushort(x), ushort(y)));
  const uint high = transposed(pair_bits(ushort(x >> 16), ushort(y >> 16)));
  float lower0 = 0.0f, lower1 = 0.0f;
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums.x), "+f"(sums.y), "+f"(lower0), "+f"(lower1)
      : "f"(a.x), "r"(0), "f"(a.y), "r"(0), "r"(__byte_perm(low, high, 0x5410)),
        "r"(__byte_perm(low, high, 0x7632)));
}
// METAL_TF32: one product, which sees 11 bits of each operand: all that a half or a bfloat has. Without it
// the rest is multiplied too, in two more products: right to about 21 bits, and slow.
METAL_FUNC void multiply(vec<float, 2>& sums, vec<float, 2> a, vec<float, 2> b) {
#ifdef METAL_TF32
  multiply_tf32(sums, a, b);
#else
  const vec<float, 2> a_high = upper_bits(a), b_high = upper_bits(b);
  multiply_tf32(sums, a - a_high, b_high);
  multiply_tf32(sums, a_high, b - b_high);
  multiply_tf32(sums, a_high, b_high);
#endif
}

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  mark_matrix();
  vec<float, 2> sums(c.elements.x, c.elements.y);
  if constexpr (is_same_v<A, B>) {
    multiply(sums, a.elements, b.elements);
  } else {
    multiply(sums, vec<float, 2>(a.elements.x, a.elements.y), vec<float, 2>(b.elements.x, b.elements.y));
  }
  d.elements = vec<D, 2>(D(sums.x), D(sums.y));
}
}  // namespace metal
