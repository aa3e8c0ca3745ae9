// mpp::tensor_ops::matmul2d by what Apple's header promises, and nothing else: which thread has which element
// is drawn at random from the schedule's seed, elements are NaN until something fills them, every thread of
// the scope has to arrive at run(), and the sums over K are in no known order. run() orders no memory.
#pragma once
#include "metal_stdlib"
#define TENSOR_FUNC MSL_INLINE
#include "tensor_types.h"

namespace msl {
// The element that a place of this thread holds: -1 for none. Same seed, same key: same map.
template <class Layout>
MSL_RUNTIME int element_at(unsigned place) {
  if (place >= Layout::capacity) msl_fault("a cooperative tensor is read past its capacity");
  const unsigned thread = Layout::threads == 1 ? 0 : Layout::threads == 32 ? msl_self->lane : msl_self->index;
  if (thread >= Layout::threads) msl_fault("this thread is outside of the operation's scope");
  return msl_layout(Layout::key, Layout::rows * Layout::columns,
                    Layout::threads * Layout::capacity)[thread * Layout::capacity + place];
}

enum class role { left, right, destination };

// One place more than are needed: some hold nothing.
template <unsigned long D, class Scope, role Role, class T, int Rows, int Columns>
struct layout {
  static constexpr int rows = Rows, columns = Columns;
  static constexpr unsigned threads = Scope::threads;
  static constexpr unsigned capacity = (Rows * Columns + threads - 1) / threads + 1;
  static constexpr uint64_t key = D * 1000003 + threads * 64 + unsigned(Role) * 8 + sizeof(T);
};
}  // namespace msl

namespace metal {
template <class T, class Layout, class... Operands>
class cooperative_tensor {
 public:
  typedef T value_type;
  typedef Layout layout;
  MSL_RUNTIME cooperative_tensor() { __builtin_memset(elements, 0xff, sizeof elements); }

  static constexpr ushort get_capacity() { return Layout::capacity; }
  MSL_INLINE bool is_valid_element(ushort i) const { return msl::element_at<Layout>(i) >= 0; }
  MSL_INLINE array<int, 2> get_multidimensional_index(ushort i) const {
    const int element = msl::element_at<Layout>(i);
    if (element < 0) msl_fault("get_multidimensional_index of an element that is not valid");
    return {element % Layout::columns, element / Layout::columns};
  }
  MSL_INLINE T& operator[](ushort i) {
    if (i >= Layout::capacity) msl_fault("a cooperative tensor is read past its capacity");
    return elements[i];
  }
  MSL_INLINE const T& operator[](ushort i) const { return const_cast<cooperative_tensor&>(*this)[i]; }

  // Outside of a tensor's extents nothing is stored, and zeros are loaded.
  template <class Tensor>
  MSL_INLINE void store(const Tensor& to) const {
    for (ushort i = 0; i < get_capacity(); i++) {
      if (!is_valid_element(i)) continue;
      const auto at = get_multidimensional_index(i);
      if (at[0] < to.msl_sizes[0] && at[1] < to.msl_sizes[1])
        to.msl_data[at[0] * to.msl_strides[0] + at[1] * to.msl_strides[1]] =
            typename Tensor::value_type(elements[i]);
    }
  }
  template <class Tensor>
  MSL_INLINE void load(const Tensor& from) {
    for (ushort i = 0; i < get_capacity(); i++) {
      if (!is_valid_element(i)) continue;
      const auto at = get_multidimensional_index(i);
      const bool inside = at[0] < from.msl_sizes[0] && at[1] < from.msl_sizes[1];
      elements[i] =
          inside ? T(from.msl_data[at[0] * from.msl_strides[0] + at[1] * from.msl_strides[1]]) : T(0);
    }
  }

 private:
  T elements[Layout::capacity];
};
}  // namespace metal

namespace msl {
template <class T>
inline constexpr bool is_cooperative = false;
template <class T, class Layout, class... O>
inline constexpr bool is_cooperative<metal::cooperative_tensor<T, Layout, O...>> = true;

// The operands of all threads as one matrix of floats [rows][columns], stored by rows.
struct matrix {
  int rows, columns;
  float* values;
  MSL_COMBINE matrix(int rows_, int columns_) : rows(rows_), columns(columns_) {
    values = static_cast<float*>(__builtin_malloc(sizeof(float) * rows * columns));
  }
  MSL_COMBINE ~matrix() { __builtin_free(values); }
  matrix(const matrix&) = delete;
  MSL_COMBINE float& at(int row, int column) { return values[row * columns + column]; }
};

template <class Request, class T, class E, class K>
MSL_COMBINE const char* gather(matrix& to, const void* const* threads, unsigned count,
                               metal::tensor<T, E, K>* Request::* operand) {
  const auto& first = *(static_cast<const Request*>(threads[0])->*operand);
  for (unsigned t = 1; t < count; t++) {
    const auto& other = *(static_cast<const Request*>(threads[t])->*operand);
    if (other.msl_data != first.msl_data || other.msl_strides[1] != first.msl_strides[1] ||
        other.msl_sizes[0] != first.msl_sizes[0] || other.msl_sizes[1] != first.msl_sizes[1])
      return "the threads pass different tensors to run()";
  }
  if (first.msl_strides[0] != 1) return "the innermost stride of a tensor must be 1";
  for (int row = 0; row < to.rows; row++) {
    const T* line = first.msl_data + row * first.msl_strides[1];
    const int inside = row < first.msl_sizes[1] ? metal::min(to.columns, first.msl_sizes[0]) : 0;
    if (inside > 0) msl_scope_read(line, sizeof(T) * inside);
    for (int column = 0; column < to.columns; column++)
      to.at(row, column) = column < inside ? float(line[column]) : 0.0f;
  }
  return nullptr;
}
template <class Request, class T, class Layout, class... O>
MSL_COMBINE const char* gather(matrix& to, const void* const* threads, unsigned count,
                               metal::cooperative_tensor<T, Layout, O...>* Request::* operand) {
  const int* places =
      msl_layout(Layout::key, Layout::rows * Layout::columns, Layout::threads * Layout::capacity);
  for (unsigned t = 0; t < count; t++) {
    const auto& mine = *(static_cast<const Request*>(threads[t])->*operand);
    for (unsigned i = 0; i < Layout::capacity; i++) {
      const int element = places[t * Layout::capacity + i];
      if (element >= 0) to.values[element] = float(reinterpret_cast<const T*>(&mine)[i]);
    }
  }
  return nullptr;
}

template <class Shape, class Left, class Right, class Destination>
struct run_request {
  typedef run_request self;
  typedef typename Destination::layout layout;
  typedef typename Destination::value_type T;
  Left* left;
  Right* right;
  Destination* destination;

  template <class Operand>
  MSL_COMBINE static int depth(const Operand& operand, bool inner) {
    if constexpr (is_cooperative<Operand>)
      return inner ? Operand::layout::columns : Operand::layout::rows;
    else
      return operand.msl_sizes[inner ? 0 : 1];
  }
  MSL_COMBINE static const char* combine(const void* const* threads, unsigned count) {
    for (unsigned t = 0; t < count; t++)
      if (!threads[t]) return "run() needs every lane of its simdgroups";
    constexpr int m = Shape::m, n = Shape::n;
    const self& own = *static_cast<const self*>(threads[0]);
    const int k = Shape::k >= 0 ? int(Shape::k) : depth(*own.left, !Shape::transpose_left);
    matrix left(Shape::transpose_left ? k : m, Shape::transpose_left ? m : k);
    matrix right(Shape::transpose_right ? n : k, Shape::transpose_right ? k : n);
    matrix sums(m, n);
    if ((!Shape::transpose_left && depth(*own.left, true) > k) ||
        (Shape::transpose_right && depth(*own.right, true) > k))
      return "an operand of run() has more columns than the product has K";
    if (const char* wrong = gather(left, threads, count, &self::left)) return wrong;
    if (const char* wrong = gather(right, threads, count, &self::right)) return wrong;
    if (Shape::accumulates)
      gather(sums, threads, count, &self::destination);
    else
      for (int i = 0; i < m * n; i++) sums.values[i] = 0.0f;
    // K in an order that no program can know: each step from the one before by a stride without a common
    // factor.
    int stride = 1 + int(msl_random() % unsigned(k));
    while (common_factor(stride, k) > 1) stride++;
    int at = int(msl_random() % unsigned(k));
    for (int step = 0; step < k; step++, at = (at + stride) % k)
      for (int row = 0; row < m; row++) {
        const float a = Shape::transpose_left ? left.at(at, row) : left.at(row, at);
        for (int column = 0; column < n; column++)
          sums.at(row, column) += a * (Shape::transpose_right ? right.at(column, at) : right.at(at, column));
      }
    const int* places =
        msl_layout(layout::key, layout::rows * layout::columns, layout::threads * layout::capacity);
    for (unsigned t = 0; t < count; t++) {
      T* mine = reinterpret_cast<T*>(static_cast<const self*>(threads[t])->destination);
      for (unsigned i = 0; i < layout::capacity; i++) {
        const int element = places[t * layout::capacity + i];
        if (element >= 0) mine[i] = T(sums.values[element]);
      }
    }
    return nullptr;
  }
  MSL_COMBINE static int common_factor(int a, int b) { return b == 0 ? a : common_factor(b, a % b); }
};
}  // namespace msl

namespace mpp {
namespace tensor_ops {
template <unsigned long D, class Scope>
class matmul2d {
  typedef matmul2d_shape<D, Scope> Shape;
  static constexpr int m = Shape::m, n = Shape::n, k = Shape::k;
  template <class T>
  using left_layout =
      msl::layout<D, Scope, msl::role::left, T, Shape::transpose_left ? k : m, Shape::transpose_left ? m : k>;
  template <class T>
  using right_layout = msl::layout<D, Scope, msl::role::right, T, Shape::transpose_right ? n : k,
                                   Shape::transpose_right ? k : n>;
  template <class Left, class Right, class T>
  using destination_tensor =
      metal::cooperative_tensor<T, msl::layout<D, Scope, msl::role::destination, T, m, n>,
                                typename Left::value_type, typename Right::value_type>;
  template <class Left, class Right, class T, class Layout>
  static constexpr bool made_for(
      const metal::cooperative_tensor<T, Layout, typename Left::value_type, typename Right::value_type>*) {
    return true;
  }
  template <class Left, class Right>
  static constexpr bool made_for(...) {
    return false;
  }

 public:
  template <class Left, class Right, class T>
  MSL_INLINE destination_tensor<Left, Right, T> get_destination_cooperative_tensor() const {
    return {};
  }
  template <class Left, class Right, class T>
  MSL_INLINE metal::cooperative_tensor<Left, left_layout<Left>> get_left_input_cooperative_tensor() const {
    static_assert(Scope::simdgroups == 1, "input cooperative tensors require a single simdgroup");
    static_assert(k > 0, "input cooperative tensors require a K");
    return {};
  }
  template <class Left, class Right, class T>
  MSL_INLINE metal::cooperative_tensor<Right, right_layout<Right>> get_right_input_cooperative_tensor()
      const {
    static_assert(Scope::simdgroups == 1, "input cooperative tensors require a single simdgroup");
    static_assert(k > 0, "input cooperative tensors require a K");
    return {};
  }
  template <class Left, class Right, class Destination>
  MSL_INLINE void run(Left& left, Right& right, Destination& to, MSL_SITE_PARAMETERS) const {
    if constexpr (msl::is_cooperative<Destination>) {
      static_assert(made_for<Left, Right>(static_cast<Destination*>(nullptr)),
                    "operands must have the types that the destination was made for");
      compute(left, right, to, MSL_SITE);
    } else {
      destination_tensor<Left, Right, typename Destination::value_type> sums;
      if (Shape::accumulates) sums.load(to);
      compute(left, right, sums, MSL_SITE);
      sums.store(to);
    }
  }

 private:
  template <class Left, class Right, class Destination>
  MSL_RUNTIME static void compute(Left& left, Right& right, Destination& to, MSL_SITE_PARAMETERS) {
    msl::run_request<Shape, Left, Right, Destination> request = {&left, &right, &to};
    msl_scope_operation("matmul2d::run", Scope::simdgroups, &request, request.combine, MSL_SITE);
  }
};
}  // namespace tensor_ops
}  // namespace mpp
