// Metal's mathematical functions and atomics. Libraries are compiled with safe math, so a function without
// `fast::` is the precise one.
#pragma once
#include "metal_types.h"
//
#include "msl_types.h"

namespace metal {
namespace fast {
using namespace metal;
MSL_FLOAT1(exp, ::__expf(x))
MSL_FLOAT1(exp2, ::exp2f(x))
}  // namespace fast
MSL_FLOAT1(erf, ::erff(x))

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
template <class T>
METAL_FUNC T atomic_load_explicit(const atomic<T>* a, memory_order) {
  return *const_cast<const volatile T*>(&a->value);
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(atomic<T>* a, U value, memory_order) {
  *const_cast<volatile T*>(&a->value) = T(value);
}
#define METAL_ATOMIC(name, function)                                           \
  template <class T, class U>                                                  \
  METAL_FUNC T atomic_##name##_explicit(atomic<T>* a, U value, memory_order) { \
    return function(&a->value, T(value));                                      \
  }
METAL_ATOMIC(fetch_add, ::atomicAdd)
METAL_ATOMIC(fetch_or, ::atomicOr)
}  // namespace metal
