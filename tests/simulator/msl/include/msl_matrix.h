// simdgroup_matrix: 8x8 elements over 32 lanes, two neighbouring columns of one row in each lane, laid out as
// on Apple GPUs.
#pragma once
#include "msl_simd.h"

namespace msl {
// Metal's thread_elements() is a vector of 64, of which a lane's two are the first: no vector of two, but one
// may be looked at through it.
template <class T>
struct matrix_storage {
  T own[2];
  MSL_INLINE T& operator[](int i) { return own[i]; }
};
}  // namespace msl

namespace metal {
template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  MSL_RUNTIME explicit simdgroup_matrix(T diagonal);
  MSL_INLINE msl::matrix_storage<T>& thread_elements() {
    return reinterpret_cast<msl::matrix_storage<T>&>(elements);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
}  // namespace metal

namespace msl {
struct matrix_place {
  int row, column;  // of the lane's first element; the second is to its right
};
MSL_COMBINE inline matrix_place place_of_lane(unsigned lane) {
  const int quad = lane / 4;
  return {(quad & 4) + int(lane / 2) % 4, (quad & 2) * 2 + int(lane % 2) * 2};
}
__attribute__((const)) MSL_RUNTIME inline matrix_place matrix_place_here() {
  return place_of_lane(msl_self->lane);
}

template <class A, class B, class C>
struct product_operands {
  metal::vec<A, 2> a;
  metal::vec<B, 2> b;
  metal::vec<C, 2> c;
};

// d = a * b + c in float, each element summed in ascending order and rounded once.
template <class D, class A, class B, class C>
struct product {
  MSL_COMBINE static const char* combine(lane_values values, lane_results results) {
    float a[8][8], b[8][8], c[8][8];
    for (unsigned lane = 0; lane < 32; lane++) {
      if (!values[lane]) return "a simdgroup_matrix needs all 32 lanes";
      const matrix_place place = place_of_lane(lane);
      const auto& mine = lane_value<product_operands<A, B, C>>(values, lane);
      for (int i = 0; i < 2; i++) {
        a[place.row][place.column + i] = float(reinterpret_cast<const A*>(&mine.a)[i]);
        b[place.row][place.column + i] = float(reinterpret_cast<const B*>(&mine.b)[i]);
        c[place.row][place.column + i] = float(reinterpret_cast<const C*>(&mine.c)[i]);
      }
    }
    for (int row = 0; row < 8; row++)
      for (int k = 0; k < 8; k++)
        for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < 32; lane++) {
      const matrix_place place = place_of_lane(lane);
      for (int i = 0; i < 2; i++) static_cast<D*>(results[lane])[i] = D(c[place.row][place.column + i]);
    }
    return nullptr;
  }
};

// Takes and gives registers, so that a compiler keeps matrices out of memory: ../../apple counts what it
// makes.
template <class D>
struct lane_elements {
  typedef D type __attribute__((ext_vector_type(2)));
};
template <class D, class A, class B, class C>
MSL_RUNTIME typename lane_elements<D>::type multiply(const char* name, A a0, A a1, B b0, B b1, C c0, C c1,
                                                     const char* file, unsigned line) {
  const metal::vec<D, 2> result = collective<product_operands<A, B, C>, metal::vec<D, 2>>(
      name, {metal::vec<A, 2>(a0, a1), metal::vec<B, 2>(b0, b1), metal::vec<C, 2>(c0, c1)},
      product<D, A, B, C>::combine, file, line);
  return {result.x, result.y};
}
}  // namespace msl

namespace metal {
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows>::simdgroup_matrix(T diagonal) {
  const msl::matrix_place place = msl::matrix_place_here();
  for (int i = 0; i < 2; i++)
    reinterpret_cast<T*>(&elements)[i] = place.row == place.column + i ? diagonal : T(0);
}

template <class T, int Columns, int Rows, class U>
MSL_INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(U value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>(static_cast<T>(value));
  return m;
}

template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source, ulong elements_per_row = 8,
                               ulong2 origin = 0, bool transpose = false) {
  const msl::matrix_place place = msl::matrix_place_here();
  for (int i = 0; i < 2; i++) {
    const ulong row = transpose ? place.column + i : place.row,
                column = transpose ? place.row : place.column + i;
    d.elements[i] = source[(origin.y + row) * elements_per_row + origin.x + column];
  }
}

template <class T>
MSL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> a, T* target, ulong elements_per_row = 8,
                                ulong2 origin = 0, bool transpose = false) {
  const msl::matrix_place place = msl::matrix_place_here();
  for (int i = 0; i < 2; i++) {
    const ulong row = transpose ? place.column + i : place.row,
                column = transpose ? place.row : place.column + i;
    target[(origin.y + row) * elements_per_row + origin.x + column] = a.elements[i];
  }
}

template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                              MSL_SITE_PARAMETERS) {
  const auto result =
      msl::multiply<D, A, B, C>("simdgroup_multiply_accumulate", a.elements.x, a.elements.y, b.elements.x,
                                b.elements.y, c.elements.x, c.elements.y, MSL_SITE);
  d.elements = vec<D, 2>(result[0], result[1]);
}

template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, MSL_SITE_PARAMETERS) {
  const auto result = msl::multiply<D, A, B, D>("simdgroup_multiply", a.elements.x, a.elements.y,
                                                b.elements.x, b.elements.y, D(0), D(0), MSL_SITE);
  d.elements = vec<D, 2>(result[0], result[1]);
}
}  // namespace metal
