// Who may touch memory that the host has asked for. It is mapped twice, for the host and for the GPU: pages
// of commands that may run are read-only for the host, and nobody's where they write. A touch is noted, and
// goes on.
//
// A command may run from its commit on, unless it stands behind a wait for an event that nobody has
// signalled, until the host has heard of its end. What it writes is nobody's before its commit, too: the host
// would read what was there before. It uses a buffer from the bound offset on; but where the host reads files
// into it, as into slots, commands use what they are told: one has read bytes if it gives other results with
// other ones.
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>

#include "dispatch.h"
#include "runtime.h"

namespace simulator {

namespace {
constexpr int kBoth = PROT_READ | PROT_WRITE;
constexpr int kMostFrames = 24;

struct Touch {
  uint64_t number;
  size_t first, end;  // bytes
  bool writes;
  std::string where;
};

struct Guards {
  std::recursive_mutex mutex;
  std::map<const char*, Memory*> memory;        // by its end for the host
  std::deque<std::shared_ptr<Line>> committed;  // that have not ended
  std::vector<std::weak_ptr<Line>> open;
  std::deque<std::shared_ptr<Use>> unheard;  // that have run
  uint64_t last = 0, heard = 0;              // commands
  uint64_t touches = 0;
};
Guards& guards() {
  static Guards& instance = *new Guards;
  return instance;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// While a command runs.
std::recursive_mutex& running() {
  static auto& instance = *new std::recursive_mutex;
  return instance;
}

// Whether the thread copies what it has read from a file.
thread_local bool copies = false;
}  // namespace

struct Guarded {
  explicit Guarded(Memory& of);
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  Memory& memory;
  const size_t size;  // of whole pages
  char* const host;
  Pages pages;                 // for the host
  std::string line;            // of Python, that has asked for it last
  bool is_read_into = false;   // by preadv
  std::vector<Touch> touches;  // while commands may run that use it
};

struct Use {
  struct Of {
    std::weak_ptr<Memory> memory;
    size_t offset;
    bool writes;
    bool counts_as_read = false, counts_as_written = false;
    bool is_found = false;
  };
  const char* kernel = "";
  std::vector<Of> all;
  // Touches up to here were before it could run.
  uint64_t read_behind = 0, written_behind = 0;
  uint64_t number = 0;  // in the order in which commands have run

  ~Use();
};

struct Line {
  struct Step {
    std::weak_ptr<Use> use;
    std::function<bool()> waits;
  };
  std::vector<Step> steps;
  size_t seen = 0, seen_before = 0;  // steps that may run, once it is committed and before
};

namespace {

size_t in_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// Moves memory to pages that are mapped twice. Returns: for the host.
char* map_again(char* data, size_t size) {
  const int file = memfd_create("MTLBuffer", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size))) throw std::bad_alloc();
  void* host = mmap(nullptr, size, kBoth, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (host == MAP_FAILED) throw std::bad_alloc();
  static const char zeros[kPage] = {};
  for (size_t at = 0; at < size; at += kPage) {  // pages of zeros stay without memory
    if (memcmp(data + at, zeros, kPage) != 0) memcpy(static_cast<char*>(host) + at, data + at, kPage);
  }
  if (mmap(data, size, kBoth, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, 0) == MAP_FAILED)
    throw std::bad_alloc();
  close(file);
  return static_cast<char*>(host);
}

// The function of host code that the thread is in, outside of this library.
std::string function_of_caller() {
  void* frames[kMostFrames];
  const int count = backtrace(frames, kMostFrames);
  Dl_info ours, info;
  if (dladdr(reinterpret_cast<void*>(&function_of_caller), &ours) == 0) return "";
  for (int i = 0; i < count; ++i) {
    if (dladdr(frames[i], &info) == 0 || info.dli_sname == nullptr || info.dli_fbase == ours.dli_fbase)
      continue;
    if (std::strstr(info.dli_fname, "/libc.so") != nullptr) continue;
    const std::string full = c10::demangle(info.dli_sname), name = full.substr(0, full.find_first_of("<("));
    if (name.find("std::") == std::string::npos) return "in " + name;
  }
  return "";
}

std::string where_now() {
  const std::string line = has_python() ? python_line() : "";
  return line.empty() ? function_of_caller() : "at " + line;
}

// Under the mutex, as what follows.
void protect(Memory& memory) {
  if (!memory.guarded) return;
  if (memory.writing == 0 && memory.reading == 0) memory.guarded->touches.clear();
  const bool is_free = dropping() || (memory.writing == 0 && memory.reading == 0);
  memory.guarded->pages.protect(is_free ? kBoth : memory.writing > 0 ? PROT_NONE : PROT_READ);
}

void count(Use::Of& of, bool Use::Of::* kind, int Memory::* number, bool counts) {
  if (of.*kind == counts) return;
  of.*kind = counts;
  const auto memory = of.memory.lock();
  if (!memory) return;
  (*memory).*number += counts ? 1 : -1;
  protect(*memory);
}

void may_run(Use& use, bool is_committed) {
  for (Use::Of& of : use.all) {
    if (of.writes && !of.counts_as_written) {
      use.written_behind = guards().touches;
      count(of, &Use::Of::counts_as_written, &Memory::writing, true);
    }
    if (is_committed && !of.counts_as_read) {
      use.read_behind = guards().touches;
      count(of, &Use::Of::counts_as_read, &Memory::reading, true);
    }
  }
}

void is_over(Use& use) {
  for (Use::Of& of : use.all) {
    count(of, &Use::Of::counts_as_written, &Memory::writing, false);
    count(of, &Use::Of::counts_as_read, &Memory::reading, false);
  }
}

// Whether nothing of the line waits.
bool walk(Line& line, bool is_committed) {
  for (size_t& at = is_committed ? line.seen : line.seen_before; at < line.steps.size(); ++at) {
    Line::Step& step = line.steps[at];
    if (step.waits && step.waits()) return false;
    if (const auto use = step.use.lock()) may_run(*use, is_committed);
  }
  return true;
}

void walk_all() {
  for (const auto& line : guards().committed)
    if (!walk(*line, true)) return;
  for (const auto& open : guards().open)
    if (const auto line = open.lock()) walk(*line, false);
}

void report_touch(const Guarded& guarded, const Touch& touch, Use& use, Use::Of& of) {
  if (std::exchange(of.is_found, true)) return;
  report(guarded.line + ": the host " + (touch.writes ? "writes" : "reads") + " memory that " + use.kernel +
         ", a command of the GPU, " + (of.writes ? "writes" : "reads") + " (byte " +
         std::to_string(touch.first) + " of " + std::to_string(guarded.memory.size) + ", touched " +
         touch.where +
         "), before it has heard of its end: wait for a signal behind it, or for its command buffer");
}

bool conflicts(const Use::Of& of, const Touch& touch) {
  return touch.end > of.offset && (of.writes || touch.writes);
}

void note(Guarded& guarded, Touch touch) {
  touch.number = ++guards().touches;
  const Memory& memory = guarded.memory;
  for (const auto& use : guards().unheard) {
    for (Use::Of& of : use->all) {
      const bool is_known = of.writes || !guarded.is_read_into;
      if (is_known && of.memory.lock().get() == &memory && conflicts(of, touch))
        return report_touch(guarded, touch, *use, of);
    }
  }
  if (memory.writing > 0 || (touch.writes && memory.reading > 0)) guarded.touches.push_back(std::move(touch));
}

// Of a fault of the host's.
void touched(Guarded& guarded, const char* address, bool writes) {
  const std::string where = copies ? "" : where_now();
  const Locked lock(guards().mutex);
  const size_t at = address - guarded.host;
  if (!copies && !(guarded.is_read_into && writes)) note(guarded, {0, at, at + 1, writes, where});
  guarded.pages.open(at / kPage, writes ? kBoth : PROT_READ);
}

}  // namespace

Guarded::Guarded(Memory& of)
    : memory(of),
      size(in_pages(of.size)),
      host(map_again(of.data, size)),
      pages(host, size, [this](const char* address, bool writes) { touched(*this, address, writes); }) {
  guards().memory[host + size] = &memory;
}

Guarded::~Guarded() {
  const Locked lock(guards().mutex);
  guards().memory.erase(host + size);
  pages.protect(kBoth);
  munmap(host, size);
  mmap(memory.data, size, kBoth, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void* contents_for_host(Memory& memory) {
  if (dropping() || memory.release) return memory.data;
  const std::string line = python_line();
  std::unique_lock<std::recursive_mutex> no_command(running(), std::defer_lock);
  if (!memory.guarded && !no_command.try_lock()) {  // it may need Python's lock
    const WaitForQueue waiting;
    no_command.lock();
  }
  const Locked lock(guards().mutex);
  if (!memory.guarded) memory.guarded = std::make_shared<Guarded>(memory);
  memory.guarded->line = line;
  protect(memory);
  return memory.guarded->host;
}

std::shared_ptr<Use> use_of(const char* kernel, const std::vector<UsedMemory>& all) {
  auto made = std::make_shared<Use>();
  made->kernel = kernel;
  for (const UsedMemory& each : all) made->all.push_back({each.memory, each.offset, each.writes});
  return made;
}

Use::~Use() {
  const Locked lock(guards().mutex);
  is_over(*this);
}

std::shared_ptr<Line> new_line() {
  const Locked lock(guards().mutex);
  auto made = std::make_shared<Line>();
  auto& open = guards().open;
  open.erase(std::remove_if(open.begin(), open.end(), [](const auto& each) { return each.expired(); }),
             open.end());
  open.push_back(made);
  return made;
}

void add_step(Line& line, const std::shared_ptr<Use>& use, std::function<bool()> waits) {
  const Locked lock(guards().mutex);
  line.steps.push_back({use, std::move(waits)});
  walk_all();
}

void commit_line(const std::shared_ptr<Line>& line) {
  const Locked lock(guards().mutex);
  auto& open = guards().open;
  open.erase(std::remove_if(open.begin(), open.end(), [&](const auto& each) { return each.lock() == line; }),
             open.end());
  guards().committed.push_back(line);
  walk_all();
}

void end_line(const std::shared_ptr<Line>& line) {
  const Locked lock(guards().mutex);
  auto& committed = guards().committed;
  committed.erase(std::remove(committed.begin(), committed.end(), line), committed.end());
  walk_all();
}

void event_changed() {
  const Locked lock(guards().mutex);
  walk_all();
}

RunningCommand::RunningCommand(const std::shared_ptr<Use>& use) : use_(use) {
  running().lock();
  const Locked lock(guards().mutex);
  may_run(*use_, true);
  use_->number = ++guards().last;
  for (Use::Of& of : use_->all) {
    const auto memory = of.memory.lock();
    if (of.writes || !memory || !memory->guarded || !memory->guarded->is_read_into) continue;
    for (const Touch& touch : memory->guarded->touches) {
      if (touch.number <= use_->read_behind || !conflicts(of, touch)) continue;
      doubtful.push_back({memory.get(), touch.first, touch.end, [this, memory, touch, &of] {
                            const Locked lock(guards().mutex);
                            report_touch(*memory->guarded, touch, *use_, of);
                          }});
    }
  }
}

RunningCommand::~RunningCommand() {
  const Locked lock(guards().mutex);
  for (Use::Of& of : use_->all) {
    const auto memory = of.memory.lock();
    if (!memory || !memory->guarded || (memory->guarded->is_read_into && !of.writes)) continue;
    for (const Touch& touch : memory->guarded->touches) {
      const bool is_early = touch.number <= (of.writes ? use_->written_behind : use_->read_behind);
      if (!is_early && conflicts(of, touch)) report_touch(*memory->guarded, touch, *use_, of);
    }
  }
  if (use_->number > guards().heard) {
    guards().unheard.push_back(use_);
  } else {
    is_over(*use_);
  }
  running().unlock();
}

uint64_t last_run() {
  const Locked lock(guards().mutex);
  return guards().last;
}

void host_hears(uint64_t number) {
  const Locked lock(guards().mutex);
  guards().heard = std::max(guards().heard, number);
  auto& unheard = guards().unheard;
  const auto is_heard = [number](const auto& use) { return use->number <= number; };
  const auto rest = std::stable_partition(unheard.begin(), unheard.end(), is_heard);
  for (auto each = unheard.begin(); each != rest; ++each) is_over(**each);
  unheard.erase(unheard.begin(), rest);
}

bool host_copies(void* to, const void* from, size_t size) {
  char* const first = static_cast<char*>(to);
  const std::string where = where_now();
  {
    const Locked lock(guards().mutex);
    const auto found = guards().memory.upper_bound(first);
    if (found == guards().memory.end() || first < found->second->guarded->host) return false;
    Guarded& guarded = *found->second->guarded;
    guarded.is_read_into = true;
    const size_t begin = first - guarded.host;
    if (size > 0) note(guarded, {0, begin, begin + size, true, where});
  }
  copies = true;
  memcpy(to, from, size);
  copies = false;
  return true;
}

bool is_for_host(const void* address) {
  const Locked lock(guards().mutex);
  const auto found = guards().memory.upper_bound(static_cast<const char*>(address));
  return found != guards().memory.end() && address >= found->second->guarded->host;
}

}  // namespace simulator
