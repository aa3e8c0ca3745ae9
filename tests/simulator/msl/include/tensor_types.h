// Metal 4's tensors and the description of mpp::tensor_ops::matmul2d, for the executor, for CUDA and for the
// strict check. TENSOR_FUNC stands before functions that take part in a kernel.
//
// Extents, strides and coordinates begin with the innermost dimension: a matrix of M rows and K columns has
// the extents (K, M).
#pragma once

namespace metal {
enum : size_t { dynamic_extent = ~size_t(0) };

// All sizes are known to the compiler, or none.
template <class Index, size_t... Sizes>
struct extents {
  Index sizes[sizeof...(Sizes)];
  TENSOR_FUNC extents() : sizes{Index(Sizes)...} {
    static_assert(((Sizes != dynamic_extent) && ...), "one size for each dynamic dimension");
  }
  template <class First, class... I>
  TENSOR_FUNC explicit extents(First first, I... n) : sizes{Index(first), Index(n)...} {
    static_assert(((Sizes == dynamic_extent) && ...) && 1 + sizeof...(I) == sizeof...(Sizes),
                  "one size for each dynamic dimension");
  }
  TENSOR_FUNC Index extent(size_t i) const { return sizes[i]; }
};
template <class Index, size_t Rank, size_t... Sizes>
struct dynamic_extents : dynamic_extents<Index, Rank - 1, dynamic_extent, Sizes...> {};
template <class Index, size_t... Sizes>
struct dynamic_extents<Index, 0, Sizes...> {
  typedef extents<Index, Sizes...> type;
};
template <class Index, size_t Rank>
using dextents = typename dynamic_extents<Index, Rank>::type;

struct tensor_inline {};
struct tensor_offset {};
struct tensor_handle {};

// A slice of a tensor that holds its own extents holds its own, too.
template <class Kind>
struct kind_of_slice {
  typedef tensor_offset type;
};
template <>
struct kind_of_slice<tensor_inline> {
  typedef tensor_inline type;
};

// The extents of a slice with these sizes: those of the tensor unless they are known to the compiler.
template <class Extents, size_t Columns, size_t Rows>
struct sliced {
  typedef extents<int, Columns, Rows> type;
  TENSOR_FUNC static type of(int, int) { return type(); }
};
template <class Extents>
struct sliced<Extents, dynamic_extent, dynamic_extent> {
  typedef Extents type;
  TENSOR_FUNC static type of(int columns, int rows) { return type(columns, rows); }
};

// Only matrices: matmul2d takes no others.
template <class T, class Extents, class Kind = tensor_handle>
struct tensor {
  typedef remove_cv_t<remove_addrspace_t<T>> value_type;
  T* msl_data;
  long msl_strides[2];
  int msl_sizes[2];

  TENSOR_FUNC tensor(T* memory, Extents e)
      : msl_data(memory), msl_strides{1, long(e.extent(0))}, msl_sizes{int(e.extent(0)), int(e.extent(1))} {}
  template <class Strides>
  TENSOR_FUNC tensor(T* memory, Extents e, Strides s)
      : msl_data(memory),
        msl_strides{long(s[0]), long(s[1])},
        msl_sizes{int(e.extent(0)), int(e.extent(1))} {}
  // The tensor from (column, row) on; with sizes, that many columns and rows of it.
  template <size_t Columns = dynamic_extent, size_t Rows = dynamic_extent>
  TENSOR_FUNC tensor<T, typename sliced<Extents, Columns, Rows>::type, typename kind_of_slice<Kind>::type>
  slice(int column, int row) const {
    return {msl_data + column * msl_strides[0] + row * msl_strides[1],
            sliced<Extents, Columns, Rows>::of(msl_sizes[0] - column, msl_sizes[1] - row), msl_strides};
  }
};

// Which threads compute an operation together.
struct execution_thread {
  enum : unsigned { simdgroups = 0, threads = 1 };
};
template <unsigned N>
struct execution_simdgroups {
  static_assert(N > 0, "an operation needs a simdgroup");
  enum : unsigned { simdgroups = N, threads = 32 * N };
};
typedef execution_simdgroups<1> execution_simdgroup;
}  // namespace metal

namespace mpp {
namespace tensor_ops {
// As a template argument it is a number: C++17 has no others.
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  TENSOR_FUNC constexpr matmul2d_descriptor(int rows, int columns, int depth = -1,
                                            bool left_transposed = false, bool right_transposed = false,
                                            bool relaxed = false, mode how = mode::multiply)
      : m(rows),
        n(columns),
        k(depth),
        transpose_left(left_transposed),
        transpose_right(right_transposed),
        relaxed_precision(relaxed),
        matmul_mode(how) {}
  TENSOR_FUNC constexpr operator unsigned long() const {
    return (unsigned long)(m & 0xffff) << 48 | (unsigned long)(n & 0xffff) << 32 |
           (unsigned long)((k + 1) & 0xffff) << 16 | (transpose_left ? 1u : 0u) |
           (transpose_right ? 2u : 0u) | (relaxed_precision ? 4u : 0u) |
           (matmul_mode == mode::multiply_accumulate ? 8u : 0u);
  }
};

// What a descriptor says, and what Apple's header demands of it.
template <unsigned long D, class Scope>
struct matmul2d_shape {
  enum : int { m = D >> 48, n = D >> 32 & 0xffff, k = int(D >> 16 & 0xffff) - 1 };  // k -1: the operands'
  enum : bool { transpose_left = D & 1, transpose_right = D >> 1 & 1, accumulates = D >> 3 & 1 };
  static_assert(m > 0 && n > 0, "M and N must be positive");
  static_assert(m % 16 == 0 || n % 16 == 0 || Scope::threads == 1, "M or N must be a multiple of 16");
  static_assert(k == -1 || (k > 0 && k % 16 == 0), "K must be dynamic or a multiple of 16");
};
}  // namespace tensor_ops
}  // namespace mpp
