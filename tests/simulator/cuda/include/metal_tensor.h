// mpp::tensor_ops::matmul2d as a plain loop: results are right, speed says nothing. Element e is with thread
// e modulo the scope's threads. As in the simulator run() orders no memory and destinations are NaN at first.
#pragma once
#include "metal_matrix.h"
#define TENSOR_FUNC METAL_FUNC
#include "tensor_types.h"

namespace metal {
template <class Scope>
METAL_FUNC uint thread_in_scope() {
  return Scope::threads == 1 ? 0 : Scope::threads == 32 ? lane() : thread_index();
}

template <class T, class Scope, int Rows, int Columns, class... Operands>
class cooperative_tensor {
  enum : int { places = (Rows * Columns + Scope::threads - 1) / Scope::threads };
  T elements[places];
  METAL_FUNC int element(int i) const { return i * Scope::threads + thread_in_scope<Scope>(); }

 public:
  typedef T value_type;
  METAL_FUNC cooperative_tensor() {
    for (int i = 0; i < places; ++i) elements[i] = T(__int_as_float(0x7fffffff));
  }
  METAL_FUNC static constexpr ushort get_capacity() { return places; }
  METAL_FUNC bool is_valid_element(ushort i) const { return element(i) < Rows * Columns; }
  METAL_FUNC metal::int2 get_multidimensional_index(ushort i) const {
    return metal::int2(element(i) % Columns, element(i) / Columns);
  }
  METAL_FUNC T& operator[](ushort i) { return elements[i]; }
  METAL_FUNC T operator[](ushort i) const { return elements[i]; }
  template <class Tensor>
  METAL_FUNC void store(const Tensor& to) const {
    for (int i = 0; i < places; ++i) {
      const metal::int2 at = get_multidimensional_index(i);
      if (is_valid_element(i) && at.x < to.msl_sizes[0] && at.y < to.msl_sizes[1])
        to.msl_data[at.x * to.msl_strides[0] + at.y * to.msl_strides[1]] =
            typename Tensor::value_type(elements[i]);
    }
  }
  template <class Tensor>
  METAL_FUNC void load(const Tensor& from) {
    for (int i = 0; i < places; ++i) {
      const metal::int2 at = get_multidimensional_index(i);
      const bool inside = is_valid_element(i) && at.x < from.msl_sizes[0] && at.y < from.msl_sizes[1];
      elements[i] =
          inside ? T(from.msl_data[at.x * from.msl_strides[0] + at.y * from.msl_strides[1]]) : T(0.0f);
    }
  }
};

template <class T>
constexpr bool is_cooperative = false;
template <class T, class Scope, int Rows, int Columns, class... O>
constexpr bool is_cooperative<cooperative_tensor<T, Scope, Rows, Columns, O...>> = true;

template <class Tensor>
METAL_FUNC float tensor_element(const Tensor& t, int column, int row) {
  const bool inside = column < t.msl_sizes[0] && row < t.msl_sizes[1];
  return inside ? float(t.msl_data[column * t.msl_strides[0] + row * t.msl_strides[1]]) : 0.0f;
}
}  // namespace metal

namespace mpp {
namespace tensor_ops {
using namespace metal;

template <unsigned long D, class Scope>
class matmul2d {
  typedef matmul2d_shape<D, Scope> Shape;

 public:
  template <class Left, class Right, class T>
  METAL_FUNC
      cooperative_tensor<T, Scope, Shape::m, Shape::n, typename Left::value_type, typename Right::value_type>
      get_destination_cooperative_tensor() const {
    return {};
  }
  template <class Left, class Right, class Destination>
  METAL_FUNC void run(const Left& left, const Right& right, Destination& to) const {
    if constexpr (is_cooperative<Destination>) {
      const int k = Shape::k >= 0 ? int(Shape::k) : left.msl_sizes[Shape::transpose_left ? 1 : 0];
      for (int i = 0; i < to.get_capacity(); ++i) {
        if (!to.is_valid_element(i)) continue;
        const metal::int2 at = to.get_multidimensional_index(i);
        float sum = Shape::accumulates ? float(to[i]) : 0.0f;
        for (int j = 0; j < k; ++j)
          sum += tensor_element(left, Shape::transpose_left ? at.y : j, Shape::transpose_left ? j : at.y) *
                 tensor_element(right, Shape::transpose_right ? j : at.x, Shape::transpose_right ? at.x : j);
        to[i] = typename Destination::value_type(sum);
      }
    } else {
      auto sums = get_destination_cooperative_tensor<Left, Right, typename Destination::value_type>();
      if (Shape::accumulates) sums.load(to);
      run(left, right, sums);
      sums.store(to);
    }
  }
};
}  // namespace tensor_ops
}  // namespace mpp
