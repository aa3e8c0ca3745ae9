// Declarations of mpp::tensor_ops for the strict check, beside metal_strict.h.
#pragma once
#include "metal_strict.h"
#define TENSOR_FUNC
#include "tensor_types.h"

namespace metal {
template <class T, class... Operands>
class cooperative_tensor {
 public:
  typedef T value_type;
  enum : ushort { capacity = 1 };
  constexpr ushort get_capacity() const { return capacity; }
  bool is_valid_element(ushort i) const;
  struct index {
    int at[2];
    int operator[](int i) const { return at[i]; }
  };
  index get_multidimensional_index(ushort i) const;
  __private T& operator[](ushort i);
  template <class Tensor>
  void store(const Tensor to) const;
  template <class Tensor>
  void load(const Tensor from);
};
}  // namespace metal

namespace mpp {
namespace tensor_ops {
template <class Left, class Right, class T>
struct made_for {
  enum : bool { fits = true };
};
template <class Left, class Right, class T, class L, class R>
struct made_for<Left, Right, metal::cooperative_tensor<T, L, R>> {
  enum : bool {
    fits = metal::is_same_v<typename Left::value_type, L> && metal::is_same_v<typename Right::value_type, R>
  };
};

// A type in no address space of its own: decltype of a variable is in one from MSL 4.1 on, and refused.
template <class T>
struct unqualified {
  enum : bool { holds = true };
};
template <class T>
struct unqualified<__private T> {
  enum : bool { holds = false };
};

template <unsigned long D, class Scope>
class matmul2d {
  typedef matmul2d_shape<D, Scope> Shape;
  enum : bool { is_checked = Shape::m > 0 };

 public:
  template <class Left, class Right, class T>
  metal::cooperative_tensor<T, typename Left::value_type, typename Right::value_type>
  get_destination_cooperative_tensor() const {
    static_assert(unqualified<Left>::holds && unqualified<Right>::holds,
                  "operands must be named types: decltype of a variable has its address space");
    return {};
  }
  template <class Left, class Right, class T>
  metal::cooperative_tensor<Left> get_left_input_cooperative_tensor() const {
    static_assert(Scope::simdgroups == 1, "input cooperative tensors require a single simdgroup");
    static_assert(int(Shape::k) > 0, "input cooperative tensors require a K");
    return {};
  }
  template <class Left, class Right, class T>
  metal::cooperative_tensor<Right> get_right_input_cooperative_tensor() const {
    static_assert(Scope::simdgroups == 1, "input cooperative tensors require a single simdgroup");
    static_assert(int(Shape::k) > 0, "input cooperative tensors require a K");
    return {};
  }
  template <class Left, class Right, class Destination>
  void run(__private Left& left, __private Right& right, __private Destination& to) const {
    static_assert(made_for<Left, Right, Destination>::fits,
                  "operands must have the types that the destination was made for");
  }
};
}  // namespace tensor_ops
}  // namespace mpp
