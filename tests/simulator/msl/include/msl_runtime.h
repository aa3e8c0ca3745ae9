// The interface between a translated shader and the executor. Shader code is instrumented; code that touches
// the executor's own data is marked MSL_RUNTIME, so that the instrumentation leaves it alone.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MSL_INLINE inline __attribute__((always_inline))
#define MSL_RUNTIME \
  __attribute__((noinline, convergent, no_sanitize("thread"), disable_sanitizer_instrumentation))
// Default arguments that name the caller's line: they survive inlining and unrolling, unlike return
// addresses.
#define MSL_SITE_PARAMETERS const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
#define MSL_SITE file, line

extern "C" {
struct msl_thread_position {
  unsigned in_threadgroup[3];  // thread_position_in_threadgroup
  unsigned index;              // thread_index_in_threadgroup
  unsigned lane;               // thread_index_in_simdgroup
  unsigned simdgroup;          // simdgroup_index_in_threadgroup
};

struct msl_group_position {
  unsigned position[3];      // threadgroup_position_in_grid
  unsigned size[3];          // threads_per_threadgroup: edge threadgroups are smaller
  unsigned full_size[3];     // dispatch_threads_per_threadgroup
  unsigned count[3];         // threadgroups_per_grid
  unsigned grid_threads[3];  // threads_per_grid
  unsigned simdgroups, full_simdgroups;
};

// `values[i]` and `results[i]` belong to lane i; a lane that does not exist has null pointers.
// Returns null or what is wrong with the operands.
typedef const char* (*msl_combine)(const void* const values[32], void* const results[32]);

#ifdef MSL_EXECUTOR
extern msl_group_position msl_group;
#else
extern const msl_group_position msl_group;
#endif
extern const msl_thread_position* msl_self;

void msl_threadgroup_barrier(unsigned flags, const char* file, unsigned line) __attribute__((convergent));
void msl_simdgroup_barrier(unsigned flags, const char* file, unsigned line) __attribute__((convergent));
void msl_simd_operation(const char* name, const void* value, void* result, msl_combine combine,
                        const char* file, unsigned line) __attribute__((convergent));
// What all threads of a simdgroup, or of a threadgroup of that many simdgroups, compute together; with 0
// simdgroups the thread alone. `values` are theirs, in order, null for one that does not exist.
typedef const char* (*msl_scope_combine)(const void* const* values, unsigned count);
void msl_scope_operation(const char* name, unsigned simdgroups, const void* value, msl_scope_combine combine,
                         const char* file, unsigned line) __attribute__((convergent));
// Within such an operation: memory that each of its threads reads.
void msl_scope_read(const void* address, size_t size);
// `places` of which each of `elements` has one, at random: the element in each place, -1 for none.
const int* msl_layout(uint64_t key, unsigned elements, unsigned places);
uint64_t msl_random(void);
void msl_fault(const char* what) __attribute__((noreturn));
// Declares an atomic access before it is made, so that its bounds and its neighbours are checked.
void msl_atomic_access(const volatile void* address, unsigned size, int writes);
void* msl_threadgroup_variable(unsigned site, size_t size, const char* name);
void* msl_threadgroup_argument(const void* bindings, unsigned index);
void* msl_buffer_argument(const void* bindings, unsigned index);
void msl_unset_constant(const char* name);
}
