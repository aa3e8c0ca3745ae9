// Runs one dispatch: a fiber per thread, simdgroups in lockstep at their operations, threadgroups one after
// another.
//
// The lanes of a simdgroup run in turn, each until it blocks at a simdgroup operation or a barrier. When the
// last has blocked, the round is over: the operation is computed for all, or the simdgroup waits at the
// barrier and the next one runs.
#include "executor.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#define MSL_EXECUTOR
#include "include/msl_runtime.h"
#include "memory.h"

// Saves the callee-saved registers on the stack it leaves and restores those of the stack it enters.
extern "C" void msl_switch(void** save, void* enter);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch,.-msl_switch
)");

const msl_thread_position* msl_self;
msl_group_position msl_group;

namespace msl {
namespace {

enum class State : uint8_t { fresh, blocked, finished };
enum class Wait : uint8_t {
  simd_operation,
  scope_operation,
  simdgroup_barrier,
  threadgroup_barrier,
  group_operation
};

struct Thread {
  msl_thread_position position;
  void* stack_pointer;
  int stack = -1;
  State state;
  Wait wait;
  const char* name;  // of the operation
  const char* file;
  unsigned line, flags;
  const void* value;
  void* result;
  msl_combine combine;
  msl_scope_combine scope_combine;

  bool same_place(const Thread& other) const {
    return wait == other.wait && line == other.line && (name == other.name || !strcmp(name, other.name)) &&
           (file == other.file || !strcmp(file, other.file));
  }
};

enum class Progress : uint8_t { running, at_barrier, finished };

struct Simdgroup {
  Thread* order[32];
  unsigned count;
  int cursor;
  Progress progress;
  uint32_t epoch;
  Stamp ordered[2];
};

constexpr size_t stack_bytes = 256 << 10;
constexpr unsigned max_threads = 1024;

std::mutex executing;
const msl_dispatch* dispatch;
void (*entry)(void*);  // of the running kernel
std::unordered_map<std::string, void (*)(void*)> loaded_kernels;
msl_counters* counters;
std::string message;
const void* finding_caller;
struct Finding {};  // thrown where no thread runs; a running thread switches back to the main stack instead
std::mt19937_64 random_source;

std::vector<Thread> threads(max_threads);
std::vector<Simdgroup> simdgroups(max_threads / 32);
std::vector<unsigned> simdgroup_order;
unsigned thread_count, running_simdgroup;
std::vector<uint64_t> group_order;
Thread* current;
const Thread* running_operation;  // whose memory is being read by all its threads
std::map<std::tuple<uint64_t, uint64_t, unsigned>, std::vector<int>> layouts;
void* main_stack_pointer;
void* group_memory[31];  // threadgroup arguments

char* stacks;
std::vector<int> free_stacks;

void take_stack_memory() {
  if (stacks) return;
  void* p = mmap(nullptr, stack_bytes * max_threads, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  stacks = static_cast<char*>(p);
  for (unsigned i = 0; i < max_threads; i++) mprotect(stacks + i * stack_bytes, 4096, PROT_NONE);
}

// The tops are staggered, or all stacks would compete for the same cache sets.
char* stack_top(int stack) {
  return stacks + (stack + 1) * stack_bytes - (stack % 61) * 192;
}

void make_current(Thread& t) {
  current = &t;
  msl_self = &t.position;
  const Simdgroup& g = simdgroups[t.position.simdgroup];
  here.simdgroup = t.position.simdgroup;
  here.stamp = g.epoch << code_bits | t.position.index;
  here.simd_ordered[0] = g.ordered[0];
  here.simd_ordered[1] = g.ordered[1];
  private_memory = {reinterpret_cast<uintptr_t>(stacks + t.stack * stack_bytes), stack_bytes};
}

[[noreturn]] void leave_group() {
  void* abandoned;
  msl_switch(&abandoned, main_stack_pointer);
  __builtin_unreachable();
}

std::string place_name(const Thread& t) {
  const char* file = strrchr(t.file, '/');
  return std::string(t.name) + " (" + (file ? file + 1 : t.file) + ":" + std::to_string(t.line) + ")";
}

template <class Items>
void shuffle_if_seeded(Items begin, Items end) {
  if (dispatch->seed) std::shuffle(begin, end, random_source);
}

[[noreturn]] void divergent(const char* what, const Thread& a, const std::string& other) {
  finding(std::string("divergent ") + what + ": thread " + thread_name(a.position.index) + " waits at " +
          place_name(a) + " while " + other);
}

Thread* first_of(Simdgroup& g) {
  g.cursor = -1;
  shuffle_if_seeded(g.order, g.order + g.count);
  while (++g.cursor < int(g.count))
    if (g.order[g.cursor]->state != State::finished) return g.order[g.cursor];
  return nullptr;
}

void new_epoch(Simdgroup& g, unsigned flags) {
  g.epoch = memory.next_epoch();
  for (unsigned space = 0; space < 2; space++)
    if (flags >> space & 1) g.ordered[space] = g.epoch << code_bits;
}

bool waits_for_group(const Thread& t) {
  return t.wait == Wait::threadgroup_barrier || t.wait == Wait::group_operation;
}

const char* kind_of(const Thread& t) {
  if (t.wait == Wait::group_operation) return "operation of the threadgroup";
  return t.wait == Wait::threadgroup_barrier ? "threadgroup_barrier" : "simdgroup operation";
}

// Computes an operation of a simdgroup or of the threadgroup, all of whose threads have arrived.
void complete_scope(const Thread& first, const void* const* values, unsigned count) {
  counters->simd_operations++;
  running_operation = &first;
  if (const char* problem = first.scope_combine(values, count)) finding(problem);
  running_operation = nullptr;
}

void complete_group_operation(const Thread& first) {
  const void* values[max_threads];
  for (unsigned i = 0; i < thread_count; i++) values[i] = threads[i].value;
  complete_scope(first, values, thread_count);
  for (Simdgroup& g : simdgroups) {
    if (!g.count) break;
    g.progress = Progress::running;
    g.cursor = -1;
  }
}

void release_threadgroup() {
  const Thread* first = nullptr;
  for (unsigned i = 0; i < thread_count; i++) {
    const Thread& t = threads[i];
    if (t.state == State::finished) continue;
    if (!first) first = &t;
    if (!t.same_place(*first))
      divergent(kind_of(*first), *first, "thread " + thread_name(i) + " waits at " + place_name(t));
  }
  for (unsigned i = 0; i < thread_count; i++)
    if (threads[i].state == State::finished)
      divergent(kind_of(*first), *first, "thread " + thread_name(i) + " has returned from the kernel");
  if (first->wait == Wait::group_operation) return complete_group_operation(*first);
  counters->barriers++;
  const bool renumbered = memory.epoch > max_epoch - 64 * 1024;
  if (renumbered) {
    memory.renumber_epochs(true);
    here.group_first = 2u << code_bits;
    here.ordered[0] = here.ordered[1] = 3u << code_bits;
  }
  const uint32_t epoch = memory.next_epoch();
  for (unsigned space = 0; space < 2; space++)
    if (first->flags >> space & 1) here.ordered[space] = epoch << code_bits;
  for (Simdgroup& g : simdgroups) {
    if (!g.count) break;
    g.epoch = epoch;
    for (unsigned space = 0; space < 2; space++)
      g.ordered[space] = renumbered ? here.ordered[space] : std::max(g.ordered[space], here.ordered[space]);
    g.progress = Progress::running;
    g.cursor = -1;
  }
}

// The thread to run after the current simdgroup has stopped; null when the threadgroup is done.
Thread* next_simdgroup() {
  for (;;) {
    bool waiting = false;
    for (unsigned index : simdgroup_order) {
      Simdgroup& g = simdgroups[index];
      waiting = waiting || g.progress == Progress::at_barrier;
      if (g.progress != Progress::running) continue;
      running_simdgroup = index;
      return first_of(g);
    }
    if (!waiting) return nullptr;
    release_threadgroup();
    shuffle_if_seeded(simdgroup_order.begin(), simdgroup_order.end());
  }
}

// Computes a simdgroup operation at which every lane has arrived.
void complete(Simdgroup& g, const Thread& first) {
  if (first.wait == Wait::simdgroup_barrier) {
    counters->simdgroup_barriers++;
    new_epoch(g, first.flags);
    return;
  }
  const void* values[32] = {};
  void* results[32] = {};
  for (unsigned i = 0; i < g.count; i++) {
    const Thread& t = *g.order[i];
    values[t.position.lane] = t.value;
    results[t.position.lane] = t.result;
  }
  if (first.wait == Wait::scope_operation) return complete_scope(first, values, 32);
  counters->simd_operations++;
  if (const char* problem = first.combine(values, results))
    finding(place_name(first) + " of simdgroup " + std::to_string(first.position.simdgroup) + ": " + problem);
}

// Every lane of the running simdgroup has blocked or returned.
Thread* end_of_round(Simdgroup& g) {
  const Thread *first = nullptr, *returned = nullptr;
  for (unsigned i = 0; i < g.count; i++) {
    const Thread& t = *g.order[i];
    if (t.state == State::finished) {
      returned = &t;
      continue;
    }
    if (!first) first = &t;
    if (!t.same_place(*first))
      divergent(kind_of(*first), *first,
                "thread " + thread_name(t.position.index) + " waits at " + place_name(t));
  }
  if (!first) {
    g.progress = Progress::finished;
    return next_simdgroup();
  }
  if (returned) {
    divergent(kind_of(*first), *first,
              "thread " + thread_name(returned->position.index) + " has returned from the kernel");
  }
  if (waits_for_group(*first)) {
    g.progress = Progress::at_barrier;
    return next_simdgroup();
  }
  complete(g, *first);
  if (dispatch->seed && random_source() % 4 == 0) {
    shuffle_if_seeded(simdgroup_order.begin(), simdgroup_order.end());
    return next_simdgroup();
  }
  return first_of(g);
}

Thread* next_thread() {
  Simdgroup& g = simdgroups[running_simdgroup];
  while (++g.cursor < int(g.count))
    if (g.order[g.cursor]->state != State::finished) return g.order[g.cursor];
  return end_of_round(g);
}

void thread_main();

void give_stack(Thread& t) {
  t.stack = free_stacks.back();
  free_stacks.pop_back();
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_top(t.stack)) & ~uintptr_t(15));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(thread_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  t.stack_pointer = top;
}

void enter(Thread& next, void** save) {
  if (next.state == State::fresh) give_stack(next);
  make_current(next);
  msl_switch(save, next.stack_pointer);
}

// A fiber runs its thread and then, on the same stack, threads that have not started: without barriers there
// is no switch.
void thread_main() {
  for (;;) {
    entry(const_cast<msl_dispatch*>(dispatch));
    current->state = State::finished;
    Thread* next = next_thread();
    if (!next) leave_group();
    if (next->state == State::fresh) {
      next->stack = current->stack;
      make_current(*next);
      continue;
    }
    free_stacks.push_back(current->stack);
    void* abandoned;
    enter(*next, &abandoned);
  }
}

void block(Wait wait, const char* name, const char* file, unsigned line) {
  Thread& t = *current;
  t.wait = wait, t.name = name, t.file = file, t.line = line;
  t.state = State::blocked;
  Thread* next = next_thread();
  if (next == &t) return make_current(t);
  enter(*next, &t.stack_pointer);
}

void stop_running() {
  current = nullptr;
  private_memory = {};
}

void place_threads(const unsigned (&size)[3]) {
  thread_count = size[0] * size[1] * size[2];
  for (Simdgroup& g : simdgroups) g.count = 0;
  simdgroup_order.clear();
  const uint32_t epoch = memory.next_epoch();
  here.group_first = here.ordered[0] = here.ordered[1] = epoch << code_bits;
  for (unsigned i = 0; i < thread_count; i++) {
    Thread& t = threads[i];
    t.position = {{i % size[0], i / size[0] % size[1], i / size[0] / size[1]}, i, i % 32, i / 32};
    t.state = State::fresh;
    Simdgroup& g = simdgroups[i / 32];
    if (!g.count) simdgroup_order.push_back(i / 32);
    g.order[g.count++] = &t;
    g.progress = Progress::running;
    g.epoch = epoch;
    g.ordered[0] = g.ordered[1] = epoch << code_bits;
  }
  shuffle_if_seeded(simdgroup_order.begin(), simdgroup_order.end());
  free_stacks.clear();
  for (int i = max_threads - 1; i >= 0; i--) free_stacks.push_back(i);
}

void run_threadgroup(uint64_t index) {
  msl_group_position& g = msl_group;
  const uint64_t counts[3] = {dispatch->grid[0], dispatch->grid[1], dispatch->grid[2]};
  const uint64_t position[3] = {index % counts[0], index / counts[0] % counts[1],
                                index / counts[0] / counts[1]};
  for (int i = 0; i < 3; i++) {
    g.position[i] = unsigned(position[i]);
    g.size[i] = g.full_size[i];
    if (g.grid_threads[i] - uint64_t(g.position[i]) * g.full_size[i] < g.full_size[i])
      g.size[i] = g.grid_threads[i] - g.position[i] * g.full_size[i];
  }
  g.simdgroups = (g.size[0] * g.size[1] * g.size[2] + 31) / 32;
  memory.begin_threadgroup();
  place_threads(g.size);
  for (int i = 0; i < dispatch->kernel->argument_count; i++) {
    const msl_argument& a = dispatch->kernel->arguments[i];
    if (a.kind == MSL_THREADGROUP)
      group_memory[a.index] = memory.threadgroup_allocate(dispatch->threadgroup_bytes[a.index], a.name);
  }
  counters->threadgroups++;
  counters->threads += thread_count;
  Thread* first = next_simdgroup();
  enter(*first, &main_stack_pointer);
  stop_running();
}

void check_launch(const msl_dispatch& d) {
  const unsigned limit = d.kernel->max_threads ? std::min(d.kernel->max_threads, max_threads) : max_threads;
  const uint64_t count = uint64_t(d.threads[0]) * d.threads[1] * d.threads[2];
  if (!count) finding("a threadgroup of no threads");
  if (count > limit)
    finding("too many threads in a threadgroup: " + std::to_string(count) + ", the limit is " +
            std::to_string(limit));
  for (int i = 0; i < d.kernel->argument_count; i++) {
    const msl_argument& a = d.kernel->arguments[i];
    if (a.kind != MSL_BUFFER) continue;
    const std::string name = "buffer " + std::to_string(a.index) + " '" + a.name + "'";
    const msl_binding& b = d.buffers[a.index];
    if (!b.data) finding(name + " is not bound");
    if (b.size < a.min_bytes)
      finding(name + " has " + std::to_string(b.size) + " bytes, but its type has " +
              std::to_string(a.min_bytes));
  }
}

// Runs `sh -c build sh image option`; what it prints is in the message when it fails.
void build_kernel(const msl_kernel& k, const std::string& image, const char* option = "") {
  const std::string log = image + ".log", lock_name = image + ".lock";
  const int lock = open(lock_name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  flock(lock, LOCK_EX);  // among processes
  int status = 0;
  if (access(image.c_str(), R_OK)) {
    const std::string script =
        "set -- '" + image + "' " + option + "; { " + k.build + "; } > '" + log + "' 2>&1";
    status = system(script.c_str());
  }
  close(lock);
  if (!status) return;
  std::string text = "does not compile:\n";
  if (FILE* f = fopen(log.c_str(), "r")) {
    char part[2048];
    text.append(part, fread(part, 1, sizeof part, f));
    fclose(f);
  }
  finding(text);
}

void load_kernel(const msl_kernel& k) {
  if (k.entry) {
    entry = k.entry;
    return;
  }
  auto& known = loaded_kernels[k.image];
  if (!known) {
    build_kernel(k, k.image);
    void* library = dlopen(k.image, RTLD_NOW | RTLD_LOCAL);
    if (!library) finding(std::string("cannot be loaded: ") + dlerror());
    const std::string image = k.image, number = image.substr(image.rfind('-') + 1);
    known = reinterpret_cast<void (*)(void*)>(
        dlsym(library, ("msl_entry" + number.substr(0, number.size() - 3)).c_str()));
    if (!known) finding("its shared object has no entry");
  }
  entry = known;
}

// Buffers lie side by side in the heap, so that running off one may end in another. For the time of the
// dispatch the small ones are moved far apart. Large ones stay: the runtime gives them address space of their
// own.
class Separation {
 public:
  static constexpr size_t copy_limit = size_t(1) << 20, distance = size_t(1) << 30;

  msl_dispatch apply(const msl_dispatch& d) {
    if (!room) {
      void* p = mmap(nullptr, 32 * distance, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) abort();
      room = static_cast<char*>(p);
    }
    msl_dispatch moved = d;
    blocks.clear();
    for (int i = 0; i < 31; i++)
      if (d.buffers[i].data && d.buffers[i].size) note(d.buffers[i], i);
    for (Block& b : blocks) {
      if (size_t(b.end - b.begin) > copy_limit) continue;
      b.is_shared = is_shared(*d.kernel, b);
      for (int binding : b.bindings) {
        if (b.copies.empty() || b.is_shared) b.copies.push_back(copy_of(b, binding));
        moved.buffers[binding].data =
            b.copies.back() + (static_cast<char*>(d.buffers[binding].data) - b.begin);
      }
    }
    return moved;
  }

  // What two arguments share though one of them writes it; "" if nothing is.
  std::string conflict(const msl_dispatch& d) const {
    for (const Block& b : blocks) {
      if (!b.is_shared) continue;
      for (int writer : b.bindings) {
        for (int other : b.bindings) {
          if (other == writer || !memory.is_accessed(writer) || !memory.is_accessed(other)) continue;
          const long shift =
              static_cast<char*>(d.buffers[writer].data) - static_cast<char*>(d.buffers[other].data);
          const long at = memory.first_conflict(writer, other, shift);
          if (at >= 0) {
            return "accesses memory by two arguments, by one of which it writes it: " + name(d, writer) +
                   " at byte " + std::to_string(at) + " is " + name(d, other) + " at byte " +
                   std::to_string(at + shift) + "; Metal's compiler takes it that arguments share no memory";
          }
        }
      }
    }
    return "";
  }

  void bring_back(const msl_dispatch& d) {
    for (const Block& b : blocks) {
      if (b.is_shared) {
        bring_back_changed(b);
      } else if (!b.copies.empty() && std::any_of(b.bindings.begin(), b.bindings.end(), [&](int binding) {
                   return is_writable(*d.kernel, binding);
                 })) {
        memcpy(b.begin, b.copies[0], b.end - b.begin);
      }
    }
  }

 private:
  struct Block {  // what the dispatch sees of one MTLBuffer
    uint64_t identity;
    char *begin, *end;
    std::vector<int> bindings;
    bool is_shared = false;  // by arguments of which one is writable: then there is a copy for each binding
    std::vector<char*> copies = {};
  };

  static bool is_writable(const msl_kernel& kernel, int binding) {
    const msl_argument* argument = buffer_argument(kernel, binding);
    return argument && argument->writable;
  }

  static bool is_shared(const msl_kernel& kernel, const Block& b) {
    int arguments = 0;
    bool writes = false;
    for (int binding : b.bindings) {
      arguments += buffer_argument(kernel, binding) != nullptr;
      writes = writes || is_writable(kernel, binding);
    }
    return writes && arguments > 1;
  }

  static std::string name(const msl_dispatch& d, int binding) {
    return "buffer " + std::to_string(binding) + " '" + buffer_argument(*d.kernel, binding)->name + "'";
  }

  char* copy_of(const Block& b, int slot) {
    char* copy = room + slot * distance + distance / 2 + (reinterpret_cast<uintptr_t>(b.begin) & 4095);
    memcpy(copy, b.begin, b.end - b.begin);
    return copy;
  }

  // Bytes that a copy changed, in kernels whose accesses nobody counts, too.
  static void bring_back_changed(const Block& b) {
    const std::vector<char> before(b.begin, b.end);
    for (const char* copy : b.copies)
      for (size_t byte = 0; byte < before.size(); byte++)
        if (copy[byte] != before[byte]) b.begin[byte] = copy[byte];
  }

  void note(const msl_binding& binding, int index) {
    char* begin = static_cast<char*>(binding.data);
    for (Block& b : blocks) {
      if (!binding.identity || b.identity != binding.identity) continue;
      b.begin = std::min(b.begin, begin), b.end = std::max(b.end, begin + binding.size);
      b.bindings.push_back(index);
      return;
    }
    blocks.push_back({binding.identity, begin, begin + binding.size, {index}});
  }

  char* room = nullptr;
  std::vector<Block> blocks;
} separation;

void order_threadgroups(const msl_dispatch& d) {
  const uint64_t count = uint64_t(d.grid[0]) * d.grid[1] * d.grid[2];
  group_order.resize(count);
  for (uint64_t i = 0; i < count; i++) group_order[i] = i;
  shuffle_if_seeded(group_order.begin(), group_order.end());
}

// "file:line" of a code address in a shader's module; empty where there is none. A kernel has no debug
// information, and is compiled again with it: the code is the same. Of the inlined frames it is the innermost
// that is not in the simulator's metal_stdlib.
std::string source_line(const msl_kernel& kernel, const void* code) {
  Dl_info info;
  if (!dladdr(code, &info) || !info.dli_fname) return "";
  std::string image = info.dli_fname;
  if (kernel.image && image == kernel.image) {
    image += ".debug";
    build_kernel(kernel, image, "-g1");
  }
  const long offset = static_cast<const char*>(code) - static_cast<const char*>(info.dli_fbase) - 1;
  char command[4096], line[4096];
  snprintf(command, sizeof command, "%s --functions=none --obj='%s' 0x%lx 2>/dev/null", MSL_SYMBOLIZER,
           image.c_str(), offset);
  FILE* pipe = popen(command, "r");
  if (!pipe) return "";
  std::string found;
  while (found.empty() && fgets(line, sizeof line, pipe)) {
    std::string text = line;
    text = text.substr(0, text.rfind(':'));  // without the column
    const size_t number = text.rfind(':'), name = text.rfind('/');
    const bool known = number != std::string::npos && text.substr(number) != ":0" && text[0] != '?';
    if (known && text.find("/msl/include/") == std::string::npos)
      found = name == std::string::npos ? text : text.substr(name + 1);
  }
  pclose(pipe);
  return found;
}
}  // namespace

// The place of an item in a grid, in which x grows first.
static std::string place_in(const unsigned* size, uint64_t index) {
  return "(" + std::to_string(index % size[0]) + ", " + std::to_string(index / size[0] % size[1]) + ", " +
         std::to_string(index / size[0] / size[1]) + ")";
}
std::string thread_name(unsigned index) {
  return place_in(msl_group.size, index);
}
std::string group_name(long order_index) {
  return place_in(dispatch->grid, group_order[order_index]);
}

void finding(const std::string& text, const void* caller) {
  message = std::string("kernel '") + dispatch->kernel->name + "'";
  if (current) {
    const unsigned* p = msl_group.position;
    message += ", thread " + thread_name(current->position.index) + " of threadgroup (" +
               std::to_string(p[0]) + ", " + std::to_string(p[1]) + ", " + std::to_string(p[2]) + ")";
  }
  message += ": " + text;
  if (running_operation && !caller) message += " [" + place_name(*running_operation) + "]";
  running_operation = nullptr;
  finding_caller = caller;
  if (!current) throw Finding();
  leave_group();
}

}  // namespace msl

using namespace msl;

void msl_threadgroup_barrier(unsigned flags, const char* file, unsigned line) {
  current->flags = flags;
  block(Wait::threadgroup_barrier, "threadgroup_barrier", file, line);
}

void msl_simdgroup_barrier(unsigned flags, const char* file, unsigned line) {
  current->flags = flags;
  block(Wait::simdgroup_barrier, "simdgroup_barrier", file, line);
}

void msl_simd_operation(const char* name, const void* value, void* result, msl_combine combine,
                        const char* file, unsigned line) {
  current->value = value, current->result = result, current->combine = combine;
  block(Wait::simd_operation, name, file, line);
}

void msl_scope_operation(const char* name, unsigned count, const void* value, msl_scope_combine combine,
                         const char* file, unsigned line) {
  current->value = value, current->scope_combine = combine;
  current->name = name, current->file = file, current->line = line;
  if (count == 0) {
    current->wait = Wait::simd_operation;
    return complete_scope(*current, &value, 1);
  }
  if (count == 1) return block(Wait::scope_operation, name, file, line);
  if (count != msl_group.simdgroups || thread_count != 32 * count)
    finding(place_name(*current) + " is an operation of " + std::to_string(count) +
            " simdgroups, the threadgroup has " + std::to_string(thread_count) + " threads");
  block(Wait::group_operation, name, file, line);
}

void msl_scope_read(const void* address, size_t size) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const Wait wait = running_operation->wait;
  memory.read_by(wait == Wait::group_operation   ? Reader::threadgroup
                 : wait == Wait::scope_operation ? Reader::simdgroup
                                                 : Reader::thread,
                 at, size);
}

const int* msl_layout(uint64_t key, unsigned elements, unsigned places) {
  auto& found = layouts[{dispatch->seed, key, places}];
  if (found.empty()) {
    found.assign(places, -1);
    for (unsigned i = 0; i < elements; i++) found[i] = int(i);
    std::mt19937_64 source(dispatch->seed * 7919 + key);
    std::shuffle(found.begin(), found.end(), source);
  }
  return found.data();
}

uint64_t msl_random() {
  return random_source();
}

void msl_fault(const char* what) {
  finding(what, __builtin_return_address(0));
}

void msl_atomic_access(const volatile void* address, unsigned size, int writes) {
  memory.atomic(reinterpret_cast<uintptr_t>(address), size, writes, __builtin_return_address(0));
}

void* msl_threadgroup_variable(unsigned site, size_t size, const char* name) {
  return memory.threadgroup_static(site, size, name);
}
void* msl_threadgroup_argument(const void*, unsigned index) {
  return group_memory[index];
}
void* msl_buffer_argument(const void* bindings, unsigned index) {
  return static_cast<const msl_dispatch*>(bindings)->buffers[index].data;
}
void msl_unset_constant(const char* name) {
  finding("reads the function constant '" + std::string(name) + "', which was not set");
}

namespace {
// A signal that a kernel raises (an integer division by zero, a stack overflow) is a finding, not the end of
// the process: the handler lets the thread continue in `crashed`, on a stack of its own.
class Signals {
 public:
  Signals() {
    stack_t stack = {};
    stack.ss_sp = handler_stack, stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; i++) sigaction(numbers[i], &action, &old[i]);
  }
  ~Signals() {
    for (int i = 0; i < 3; i++) sigaction(numbers[i], &old[i], nullptr);
    if (!(old_stack.ss_flags & SS_DISABLE))
      sigaltstack(&old_stack, nullptr);
    else
      sigaltstack(&(old_stack = {nullptr, SS_DISABLE, 0}), nullptr);
  }

 private:
  static void handle(int number, siginfo_t*, void* context) {
    if (private_memory.has_everything()) {  // not a kernel's: it happens again, for whom it would without us
      for (int i = 0; i < 3; i++)
        if (numbers[i] == number) sigaction(number, &old[i], nullptr);
      return;
    }
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    signal_number = number;
    // As a return address: one past the instruction.
    signal_address = reinterpret_cast<const void*>(registers[REG_RIP] + 1);
    registers[REG_RIP] = reinterpret_cast<greg_t>(crashed);
    const auto top = reinterpret_cast<uintptr_t>(crash_stack + sizeof crash_stack);
    registers[REG_RSP] = greg_t((top & ~uintptr_t(15)) - 8);
  }

  [[noreturn]] static void crashed() {
    if (signal_number == SIGFPE) finding("divides an integer by zero", signal_address);
    finding("crashes with signal " + std::to_string(signal_number) +
                ": private memory over 256 KiB, or an access unseen",
            signal_address);
  }

  static constexpr int numbers[3] = {SIGFPE, SIGSEGV, SIGBUS};
  static inline char handler_stack[64 << 10], crash_stack[64 << 10];
  static inline int signal_number;
  static inline const void* signal_address;
  static inline struct sigaction old[3];
  stack_t old_stack;
};

// Apple's GPUs take float32 subnormals for zero, as operands and as results. So does this CPU meanwhile;
// halves keep theirs, which are normal numbers as floats, and conversions between the two do not look at
// these bits.
class FlushSubnormals {
 public:
  FlushSubnormals() : old(_mm_getcsr()) { _mm_setcsr(old | flush_to_zero | denormals_are_zero); }
  ~FlushSubnormals() { _mm_setcsr(old); }

 private:
  static constexpr unsigned flush_to_zero = 1 << 15, denormals_are_zero = 1 << 6;
  const unsigned old;
};

void run(const msl_dispatch& d) {
  const FlushSubnormals flush;
  dispatch = &d;
  memory.begin(d, reinterpret_cast<const void*>(entry));
  order_threadgroups(d);
  for (int i = 0; i < 3; i++) {
    msl_group.full_size[i] = d.threads[i];
    msl_group.count[i] = d.grid[i];
    msl_group.grid_threads[i] = d.total_threads[i] ? d.total_threads[i] : d.grid[i] * d.threads[i];
  }
  msl_group.full_simdgroups = (d.threads[0] * d.threads[1] * d.threads[2] + 31) / 32;
  for (size_t i = 0; i < group_order.size() && message.empty(); i++) run_threadgroup(group_order[i]);
}
}  // namespace

extern "C" int msl_execute(const msl_dispatch* d, msl_counters* result, char* text, size_t text_size) {
  std::lock_guard<std::mutex> lock(executing);
  memset(result, 0, sizeof *result);
  dispatch = d, counters = result;
  message.clear();
  finding_caller = nullptr;
  random_source.seed(d->seed);
  take_stack_memory();
  try {
    check_launch(*d);
    load_kernel(*d->kernel);
    const msl_dispatch separated = separation.apply(*d);
    try {
      const Signals signals;
      run(separated);
    } catch (const Finding&) {
    }
    stop_running();
    const std::string shared = message.empty() ? separation.conflict(*d) : "";
    separation.bring_back(*d);
    memory.end(*result);
    if (!shared.empty()) finding(shared);
  } catch (const Finding&) {
  }
  if (message.empty()) return 0;
  if (finding_caller) {
    const std::string line = source_line(*d->kernel, finding_caller);
    if (!line.empty()) message += " [" + line + "]";
  }
  snprintf(text, text_size, "%s", message.c_str());
  return 1;
}
