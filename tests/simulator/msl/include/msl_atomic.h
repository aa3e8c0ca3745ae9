// Atomics. Threads are fibers of one core, so that a plain operation is atomic; the access is declared to the
// checker.
#pragma once
#include "msl_types.h"

namespace metal {
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
}  // namespace metal

namespace msl {
template <class T, class F>
MSL_RUNTIME T atomic_update(volatile metal::atomic<T>* object, F next) {
  msl_atomic_access(&object->value, sizeof(T), 1);
  T old = object->value;
  object->value = next(old);
  return old;
}
template <class T>
MSL_RUNTIME T atomic_read(const volatile metal::atomic<T>* object) {
  msl_atomic_access(&object->value, sizeof(T), 0);
  return object->value;
}
// An operand of the object's type, not deduced: atomic_fetch_add_explicit(uint_counter, 1, ...) is common.
#define MSL_ATOMIC_OPERATION(name, next_value)                         \
  template <class T>                                                   \
  struct atomic_##name {                                               \
    T operand;                                                         \
    __attribute__((no_sanitize("thread"))) T operator()(T old) const { \
      return T(next_value);                                            \
    }                                                                  \
  };
MSL_ATOMIC_OPERATION(add, old + operand)
MSL_ATOMIC_OPERATION(and, old& operand)
MSL_ATOMIC_OPERATION(or, old | operand)
MSL_ATOMIC_OPERATION(min, operand < old ? operand : old)
MSL_ATOMIC_OPERATION(max, operand > old ? operand : old)
MSL_ATOMIC_OPERATION(exchange, operand)
}  // namespace msl

namespace metal {
#define MSL_ATOMIC_FUNCTION(function, name)                                                     \
  template <class T>                                                                            \
  MSL_INLINE T function(volatile atomic<T>* object, msl::identity_t<T> operand, memory_order) { \
    return msl::atomic_update(object, msl::atomic_##name<T>{operand});                          \
  }
MSL_ATOMIC_FUNCTION(atomic_fetch_add_explicit, add)
MSL_ATOMIC_FUNCTION(atomic_fetch_and_explicit, and)
MSL_ATOMIC_FUNCTION(atomic_fetch_or_explicit, or)
MSL_ATOMIC_FUNCTION(atomic_fetch_min_explicit, min)
MSL_ATOMIC_FUNCTION(atomic_fetch_max_explicit, max)
template <class T>
MSL_INLINE T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  return msl::atomic_read(object);
}
template <class T>
MSL_INLINE void atomic_store_explicit(volatile atomic<T>* object, msl::identity_t<T> value, memory_order) {
  msl::atomic_update(object, msl::atomic_exchange<T>{value});
}
template <class T>
MSL_RUNTIME bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                       msl::identity_t<T> desired, memory_order,
                                                       memory_order) {
  msl_atomic_access(&object->value, sizeof(T), 1);
  T old = object->value;
  if (old == *expected) {
    object->value = desired;
    return true;
  }
  *expected = old;
  return false;
}
}  // namespace metal
