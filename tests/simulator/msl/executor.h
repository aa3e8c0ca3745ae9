// The C interface between the simulated Metal runtime and the MSL executor.
//
// A translated .metal file is a shared object that exports `msl_kernels`; the runtime binds buffers and asks
// the executor to run one dispatch. Both sides are built by tests/simulator/build.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum msl_argument_kind { MSL_BUFFER = 0, MSL_THREADGROUP = 1 };

typedef struct {
  int kind;          // msl_argument_kind
  int index;         // the number in [[buffer(n)]] or [[threadgroup(n)]]
  size_t min_bytes;  // a reference argument needs this many bytes; 0 for pointers
  int writable;      // 0 for const or constant arguments
  const char* name;  // as written in the source
} msl_argument;

typedef struct {
  const char* name;               // host_name or function name
  void (*entry)(void* bindings);  // runs one thread; `bindings` is opaque to the runtime
  const msl_argument* arguments;
  int argument_count;
  unsigned max_threads;  // max_total_threads_per_threadgroup, 0 without the attribute
  const char* image;     // executor's own: where entry is null, the shared object that exports `msl_entry`,
  const char* build;     // and the shell command that makes it on first use
} msl_kernel;

// Exported by every translated library.
typedef const msl_kernel* (*msl_kernels_fn)(int* count);

typedef struct {
  void* data;         // host address after the binding's offset; NULL when unbound
  size_t size;        // bytes from data to the end of the MTLBuffer, or the length given to setBytes
  uint64_t identity;  // the MTLBuffer's number, 0 for setBytes: two bindings of one buffer are one memory
} msl_binding;

typedef struct {
  uint64_t bytes_read, bytes_written;                    // every access, summed
  uint64_t distinct_bytes_read, distinct_bytes_written;  // each byte once
} msl_traffic;

typedef struct {
  msl_traffic buffers[31];
  uint64_t threadgroups, threads, barriers, simdgroup_barriers, simd_operations, atomics,
      threadgroup_accesses;
} msl_counters;

typedef struct {
  const msl_kernel* kernel;
  msl_binding buffers[31];
  size_t threadgroup_bytes[31];
  unsigned grid[3];     // threadgroups
  unsigned threads[3];  // per threadgroup
  unsigned
      total_threads[3];  // dispatchThreads: edge threadgroups are cut to it; all 0 for dispatchThreadgroups
  uint64_t seed;         // order of threads and threadgroups; 0 is ascending
  const void* indirect;  // where an indirect dispatch has its grid from; NULL for the others
} msl_dispatch;

// Runs the dispatch to its end or to the first finding. Returns 0, or the number of findings with their text
// in `message`.
int msl_execute(const msl_dispatch* dispatch, msl_counters* counters, char* message, size_t message_size);

#ifdef __cplusplus
}
#endif
