// Makes a kernel callable for one thread: every argument is fetched according to its attribute.
#pragma once
#include "../executor.h"
#include "metal_stdlib"

namespace msl {
template <msl_argument_kind Kind, unsigned Index, void* (*Fetch)(const void*, unsigned)>
struct memory_argument {
  static constexpr int kind = Kind, index = Index;
  template <class A>
  MSL_COMBINE static A get(const void* bindings) {
    void* data = Fetch(bindings, Index);
    if constexpr (std::is_pointer_v<A>) {
      return static_cast<A>(data);
    } else {
      return *static_cast<std::remove_reference_t<A>*>(data);
    }
  }
};
template <unsigned Index>
using buffer = memory_argument<MSL_BUFFER, Index, msl_buffer_argument>;
template <unsigned Index>
using threadgroup_memory = memory_argument<MSL_THREADGROUP, Index, msl_threadgroup_argument>;
// An argument whose function_constant is false or unset does not exist.
struct absent {
  static constexpr int kind = -1, index = -1;
  template <class A>
  MSL_COMBINE static A get(const void*) {
    if constexpr (std::is_pointer_v<A>) {
      return nullptr;
    } else {
      alignas(16) static char zeros[sizeof(A)];
      return reinterpret_cast<A>(zeros);
    }
  }
};
template <bool Exists, class Getter>
using present_if = std::conditional_t<Exists, Getter, absent>;

#define MSL_SCALAR_ATTRIBUTE(name, expression)  \
  struct name {                                 \
    static constexpr int kind = -1, index = -1; \
    template <class A>                          \
    MSL_COMBINE static A get(const void*) {     \
      return A(expression);                     \
    }                                           \
  };
#define MSL_VECTOR_ATTRIBUTE(name, x_, y_, z_)    \
  struct name {                                   \
    static constexpr int kind = -1, index = -1;   \
    template <class A>                            \
    MSL_COMBINE static A get(const void*) {       \
      if constexpr (shape<A>::size == 1) {        \
        return A(x_);                             \
      } else if constexpr (shape<A>::size == 2) { \
        return A(x_, y_);                         \
      } else {                                    \
        return A(x_, y_, z_);                     \
      }                                           \
    }                                             \
  };
#define MSL_GROUP_ATTRIBUTE(name, member) \
  MSL_VECTOR_ATTRIBUTE(name, msl_group.member[0], msl_group.member[1], msl_group.member[2])
#define MSL_IN_GRID(i) (msl_group.position[i] * msl_group.full_size[i] + msl_self->in_threadgroup[i])
MSL_VECTOR_ATTRIBUTE(thread_position_in_threadgroup, msl_self->in_threadgroup[0], msl_self->in_threadgroup[1],
                     msl_self->in_threadgroup[2])
MSL_VECTOR_ATTRIBUTE(thread_position_in_grid, MSL_IN_GRID(0), MSL_IN_GRID(1), MSL_IN_GRID(2))
MSL_GROUP_ATTRIBUTE(threadgroup_position_in_grid, position)
MSL_GROUP_ATTRIBUTE(threads_per_threadgroup, size)
MSL_GROUP_ATTRIBUTE(dispatch_threads_per_threadgroup, full_size)
MSL_GROUP_ATTRIBUTE(threadgroups_per_grid, count)
MSL_GROUP_ATTRIBUTE(threads_per_grid, grid_threads)
MSL_SCALAR_ATTRIBUTE(thread_index_in_threadgroup, msl_self->index)
MSL_SCALAR_ATTRIBUTE(thread_index_in_simdgroup, msl_self->lane)
MSL_SCALAR_ATTRIBUTE(thread_index_in_quadgroup, msl_self->lane % 4)
MSL_SCALAR_ATTRIBUTE(simdgroup_index_in_threadgroup, msl_self->simdgroup)
MSL_SCALAR_ATTRIBUTE(quadgroup_index_in_threadgroup, msl_self->index / 4)
MSL_SCALAR_ATTRIBUTE(simdgroups_per_threadgroup, msl_group.simdgroups)
MSL_SCALAR_ATTRIBUTE(dispatch_simdgroups_per_threadgroup, msl_group.full_simdgroups)
MSL_SCALAR_ATTRIBUTE(threads_per_simdgroup, 32)
MSL_SCALAR_ATTRIBUTE(quadgroups_per_threadgroup,
                     (msl_group.size[0] * msl_group.size[1] * msl_group.size[2] + 3) / 4)

// A function constant that the host did not set: reading it is an error at run time, as in Metal.
template <class T>
struct unset_constant {
  const char* name;
  MSL_RUNTIME operator T() const {
    msl_unset_constant(name);
    return T();
  }
};

// What a kernel's arguments are, from its type alone: its code is not generated for that.
template <class F, class... Getters>
struct signature;
template <class... A, class... Getters>
struct signature<void(A...), Getters...> {
  static_assert(sizeof...(A) == sizeof...(Getters));
  MSL_RUNTIME static void call(void (*kernel)(A...), void* bindings) {
    kernel(Getters::template get<A>(bindings)...);
  }

  // Keeps the buffer and threadgroup arguments, in the order of the source.
  static msl_kernel describe(const char* name, const char* const* names, unsigned max_threads,
                             const char* image, const char* build) {
    static msl_argument arguments[sizeof...(A) + 1];
    int count = 0, at = 0;
    ((add<A, Getters>(arguments, count, names[at]), at++), ...);
    return {name, nullptr, arguments, count, max_threads, image, build};
  }
  template <class Argument, class Getter>
  static void add(msl_argument* to, int& count, const char* name) {
    typedef std::remove_reference_t<Argument> Plain;
    typedef std::remove_pointer_t<Plain> Pointee;
    if (Getter::kind < 0) return;
    const size_t bytes = std::is_reference_v<Argument> ? sizeof(Plain) : 0;
    to[count++] = {Getter::kind, Getter::index, bytes, !std::is_const_v<Pointee>, name};
  }
};
}  // namespace msl
