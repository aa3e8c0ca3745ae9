// mpp::tensor_ops::matmul2d for the cost model, which counts what threads do around a product and nothing of
// the product itself: that is the tensor units' work. Elements go round the threads; sums are not computed.
#pragma once
#include "metal_stdlib"
#define TENSOR_FUNC MSL_INLINE
#include "tensor_types.h"

extern "C" void apple_tensor_product(void* sums);  // hooks.cpp

namespace metal {
template <class T, class Scope, int Rows, int Columns>
class cooperative_tensor {
 public:
  typedef T value_type;
  static constexpr ushort get_capacity() { return Rows * Columns / Scope::threads; }
  MSL_INLINE T& operator[](ushort i) { return elements[i]; }
  template <class Tensor>
  MSL_INLINE void store(const Tensor& to) const {
    const unsigned thread = Scope::threads == 32 ? msl_self->lane : msl_self->index;
    for (ushort i = 0; i < get_capacity(); i++)
      to.msl_data[i * Scope::threads + thread] = typename Tensor::value_type(elements[i]);
  }

 private:
  T elements[Rows * Columns / Scope::threads];
};
}  // namespace metal

namespace mpp {
namespace tensor_ops {
template <unsigned long D, class Scope>
class matmul2d {
  typedef matmul2d_shape<D, Scope> Shape;

 public:
  template <class Left, class Right, class T>
  MSL_INLINE metal::cooperative_tensor<T, Scope, Shape::m, Shape::n> get_destination_cooperative_tensor()
      const {
    return {};
  }
  template <class Left, class Right, class Destination>
  MSL_INLINE void run(Left&, Right&, Destination& to) const {
    apple_tensor_product(&to);
  }
};
}  // namespace tensor_ops
}  // namespace mpp
