// What the instrumentation's callbacks check: bounds, initialisation, races, traffic.
//
// Two accesses to one byte, of which at least one writes, race unless something orders them:
//   - threadgroup_barrier orders them within a threadgroup if its flags name the memory: mem_threadgroup
//   orders threadgroup
//     memory, mem_device orders device memory, mem_none orders nothing;
//   - simdgroup_barrier does the same within a simdgroup;
//   - a simdgroup operation (simd_sum, a shuffle, a matrix product) orders no memory: the specification gives
//   it execution
//     in lockstep, but the compiler may move loads and stores across it, so that relying on it is an error;
//   - nothing orders the threadgroups of one dispatch;
//   - atomic operations do not race with each other, but with plain accesses they do.
// The order in which the threads happen to run does not matter: unordered accesses are found in every order,
// as long as they are made. Threads that write the same value race, too.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

#include "executor.h"

namespace msl {

// Who accessed a byte last, and when. The upper bits are an epoch: a number drawn at every barrier, so that
// "before the last barrier" is a comparison. The lower bits are a thread index or one of the codes below.
typedef uint32_t Stamp;
constexpr unsigned code_bits = 11, max_epoch = (1u << (32 - code_bits)) - 2;
enum : Stamp {
  code_simdgroup = 1024,    // + simdgroup: several lanes of it read
  code_many = 1056,         // threads of several simdgroups read
  code_many_groups = 1057,  // threads of several threadgroups read
  code_atomic = 1088,       // + simdgroup: an atomic operation
  code_mask = (1u << code_bits) - 1,
  redzone = ~0u,  // threadgroup memory that belongs to no variable
};

enum class Space { device_readonly, device, threadgroup, module };

// A contiguous piece of memory that shader code may touch, with its shadow.
struct Segment {
  uintptr_t base = 0;
  size_t size = 0;
  Space space;
  int binding = -1;
  msl_traffic traffic = {};
  uint64_t *read_bits = nullptr, *write_bits = nullptr;  // one bit a byte
  Stamp *reads = nullptr, *writes = nullptr;             // one stamp a byte
  uint8_t* touched = nullptr;  // one flag a chunk: what is counted and cleared afterwards
};
constexpr unsigned chunk_shift = 15;

struct ThreadgroupVariable {
  size_t offset, size;
  std::string name;
};

// Where the running thread stands; the scheduler keeps it current.
struct Place {
  Stamp stamp = 0;             // epoch and thread index
  Stamp group_first = 0;       // stamps below are of earlier threadgroups
  Stamp ordered[2] = {};       // [device, threadgroup]: stamps below are ordered by a threadgroup barrier
  Stamp simd_ordered[2] = {};  // the same for stamps of the own simdgroup
  unsigned simdgroup = 0;
};

// The private memory of what this thread of the process executes: a fiber's stack. Where it executes no
// kernel everything is private, so that nothing is judged: static constructors and tables of a shader's
// module are instrumented too, and any thread may run them beside a kernel.
struct PrivateMemory {
  uintptr_t low = 0;
  size_t size = ~size_t(0);

  bool has(uintptr_t address) const { return address - low < size; }
  bool has_everything() const { return size == ~size_t(0); }
};

enum class Reader { thread, simdgroup, threadgroup };

class Memory {
 public:
  static constexpr size_t arena_size = 256 << 10, arena_limit = 32 << 10, redzone_bytes = 512;

  // `code` lies in the module whose globals the kernel may read.
  void begin(const msl_dispatch& dispatch, const void* code);
  void end(msl_counters& counters);
  void begin_threadgroup();
  void* threadgroup_allocate(size_t bytes, const std::string& name);
  void* threadgroup_static(unsigned site, size_t bytes, const char* name);

  void access(uintptr_t address, size_t size, bool write, const void* caller);
  // For accesses whose type is as aligned as it is large.
  void aligned_access(uintptr_t address, size_t size, bool write, const void* caller);
  void atomic(uintptr_t address, unsigned size, bool write, const void* caller);

  // Whether a binding with memory of its own was accessed; and the first byte that `writer` wrote and whose
  // neighbour `shift` bytes further on was accessed by `other`, or -1.
  bool is_accessed(int binding) const;
  long first_conflict(int writer, int other, long shift) const;

  // A read that all these threads make.
  void read_by(Reader reader, uintptr_t address, size_t size);

  uint32_t next_epoch();
  void renumber_epochs(bool within_group);
  // The threadgroup that an epoch belongs to, as an index into the run order; -1 when no longer known.
  long group_of(Stamp stamp) const;

  uint32_t epoch = 1;
  uint64_t threadgroup_accesses = 0, atomics = 0;

 private:
  template <bool Write>
  void device(Segment& segment, size_t offset, size_t size, const void* caller);
  template <bool Write>
  void threadgroup(size_t offset, size_t size, const void* caller);
  template <bool Write>
  void check(Segment& segment, size_t offset, size_t size, bool atomic, const void* caller);
  Segment* find(uintptr_t address, size_t size, bool write, const void* caller);
  Segment arena_segment();
  const Segment* of_binding(int binding) const;
  void add_buffers(const msl_dispatch& dispatch);
  void add_module(const void* code);
  void clear(Segment& segment);
  [[noreturn]] void out_of_bounds(uintptr_t address, size_t size, bool write, const void* caller);
  void misaligned(uintptr_t address, size_t size, bool write, const void* caller);
  [[noreturn]] void race(Segment& segment, size_t at, Stamp other, bool other_wrote, bool write, bool atomic,
                         const void* caller);
  std::string where(const Segment& segment, size_t offset) const;
  void* shadow_room(size_t bytes);

  std::vector<Segment> segments;
  Segment* recent[256];
  char* arena = nullptr;
  Stamp *arena_reads = nullptr, *arena_writes = nullptr;
  char* shadow = nullptr;
  size_t shadow_used = 0, arena_used = 0, arena_counted = 0;
  std::vector<ThreadgroupVariable> variables;
  struct StaticVariable {
    size_t offset, size;
    unsigned group;
  };
  std::vector<StaticVariable> statics;
  unsigned groups_begun = 0;
  static constexpr uint64_t spin_limit = 20'000'000;  // atomic operations of one thread between two barriers
  Stamp spinning = 0;
  uint64_t spins = 0;
  std::vector<uint32_t> group_epochs;  // first epoch of each threadgroup since the last renumbering
  const msl_dispatch* dispatch = nullptr;
};

extern Memory memory;
extern Place here;
// Every access asks for it: __thread and this model need no call.
extern __thread PrivateMemory private_memory __attribute__((tls_model("initial-exec")));

// Ends the dispatch with this text; `caller` is the code address to name a source line for.
[[noreturn]] void finding(const std::string& text, const void* caller = nullptr);
// The kernel's argument [[buffer(index)]], null if it has none.
const msl_argument* buffer_argument(const msl_kernel& kernel, int index);
std::string thread_name(unsigned index);
std::string group_name(long order_index);

}  // namespace msl
