// Commands: validated when they are encoded, run in order when the stream is synchronised.
#include "commands.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "dispatch.h"
#include "foundation.h"
#include "runtime.h"

namespace simulator {
namespace {

using Buffers = std::vector<std::shared_ptr<CommandBuffer>>;

struct State {
  std::mutex mutex;
  std::map<StreamNumber, std::shared_ptr<Encoding>> streams;
  std::map<StreamNumber, Buffers> enqueued;  // in each queue, up to the first that is not committed
  Buffers committed;
  std::condition_variable told;
  int64_t telling = 0;               // threads that call handlers
  bool running = false;              // buffers that have left `committed` and may not have run yet
  Failure failure = Failure::kNone;  // of a buffer to come
  uint64_t before_failure = 0;       // buffers
  uint64_t failures = 0;             // that many in a row
  bool failed = false;
  uint64_t timeouts = 0;                       // buffers that have timed out
  uint64_t most_timeouts = 0;                  // so many, and all later buffers are ignored; 0: none is
  bool fails_victims = false;                  // buffers that are committed after one that fails
  std::atomic<size_t> working_set = SIZE_MAX;  // bytes that the GPU may have at once
  simulator_execute execute = nullptr, plain_execute = nullptr;  // now, and of the executor
  uint64_t seed = 0;
  std::atomic<bool> runs_alone = false;  // the GPU has a thread of its own
  std::minstd_rand drawn;                // how late it, and who hears of it, is then
  size_t most_threads = SIZE_MAX;        // of a pipeline, set by a test
  std::atomic<bool> dropping = false, validating = true;

  std::atomic<double> watchdog =
      0;  // seconds of the real clock after which a buffer that waits is ended; 0: never
  uint64_t commits = 0;
  std::atomic<double> clock = 0;                       // of the GPU, seconds
  bool timed = false;                                  // the host has a clock, too
  double host = 0;                                     // its time, seconds by the GPU's clock
  double a_command = 0;                                // seconds of the host to encode one
  double an_operator = 0;                              // seconds of the GPU for one of aten
  double idle = 0;                                     // seconds that the GPU has waited for the host
  double an_event = 0;                                 // seconds until a signal is heard of
  double an_end = 0;                                   // and until a host that waits knows of a buffer's end
  double waited = 0;                                   // seconds that the GPU has waited for signals
  double answer = 0;                                   // the time of the host's thread that answers them
  CommandBuffer* opened = nullptr;                     // runs before it is committed
  std::vector<std::shared_ptr<CommandBuffer>> untold;  // have run, and the host does not know it yet
  std::vector<std::shared_ptr<CommandBuffer>> unseen;  // have run, with copies that it does not see yet

  std::atomic<bool> tracing = false;
  std::string trace;
  std::map<uint64_t, std::string> trace_names;  // identity of a buffer -> A, B, ... by first appearance

  bool counting = false;
  std::vector<simulator_dispatch_counters> counted;
};

State& state() {
  static State* instance = new State;
  return *instance;
}

std::string size_text(const std::array<size_t, 3>& size) {
  return std::to_string(size[0]) + "x" + std::to_string(size[1]) + "x" + std::to_string(size[2]);
}

std::string letters(size_t number) {
  std::string text(1, static_cast<char>('A' + number % 26));
  return number < 26 ? text : letters(number / 26 - 1) + text;
}

std::string binding_text(const Binding& binding) {
  if (binding.bytes) return std::to_string(binding.bytes->size()) + " bytes";
  auto& names = state().trace_names;
  auto [entry, is_new] = names.try_emplace(binding.memory->identity, letters(names.size()));
  return entry->second + "[" + std::to_string(binding.offset) + ":" + std::to_string(binding.memory->size) +
         "]";
}

std::string trace_text(const Command& command) {
  std::ostringstream line;
  line << command.kernel->name << " grid ";
  switch (command.kind) {
    case GridKind::kThreads: line << size_text(command.grid) << " threads"; break;
    case GridKind::kThreadgroups: line << size_text(command.grid); break;
    case GridKind::kIndirect: line << binding_text(command.indirect); break;
  }
  line << " of " << size_text(command.threads) << ":";
  // The kernel's own bindings: those that an earlier command of the block left behind do not count.
  const msl_kernel& kernel = *command.kernel;
  std::map<int, const Binding*> buffers;
  std::map<int, size_t> memory;
  for (int i = 0; i < kernel.argument_count; i++) {
    const msl_argument& argument = kernel.arguments[i];
    if (argument.kind == MSL_BUFFER) {
      buffers[argument.index] = &command.buffers[argument.index];
    } else {
      memory[argument.index] = command.threadgroup_bytes[argument.index];
    }
  }
  for (const auto& [index, binding] : buffers) line << " " << index << "=" << binding_text(*binding);
  for (const auto& [index, bytes] : memory) line << " threadgroup(" << index << ")=" << bytes << " bytes";
  return line.str();
}

// --- validation, in the spirit of Metal's API validation

void check_threads(const Command& command) {
  const std::string title = command.kernel->name;
  const size_t limit = thread_limit(*command.kernel);
  const size_t total = command.threads[0] * command.threads[1] * command.threads[2];
  if (total == 0)
    fail(title + ": threads per threadgroup are " + size_text(command.threads) + ", none may be 0");
  if (total > limit) {
    fail(title + ": " + std::to_string(total) + " threads per threadgroup (" + size_text(command.threads) +
         ") are over the pipeline's limit of " + std::to_string(limit));
  }
  if (command.kind == GridKind::kIndirect) return;
  for (size_t extent : command.grid) {
    if (extent == 0) fail(title + ": the grid is " + size_text(command.grid) + ", none may be 0");
    if (extent > UINT_MAX) fail(title + ": the grid is " + size_text(command.grid) + ", over 32 bits");
  }
}

void check_arguments(const Command& command) {
  const msl_kernel& kernel = *command.kernel;
  const std::string title = command.kernel->name;
  for (int i = 0; i < kernel.argument_count; i++) {
    const msl_argument& argument = kernel.arguments[i];
    const bool is_buffer = argument.kind == MSL_BUFFER;
    const std::string name = std::string(is_buffer ? "buffer(" : "threadgroup(") +
                             std::to_string(argument.index) + ") '" + argument.name + "'";
    if (!is_buffer) {
      if (command.threadgroup_bytes[argument.index] == 0) {
        fail(title + ": " + name + " has no memory: setThreadgroupMemoryLength was not called");
      }
      continue;
    }
    const Binding& binding = command.buffers[argument.index];
    if (!binding.bound()) fail(title + ": " + name + " is not bound");
    if (binding.bytes && argument.writable)
      fail(title + ": " + name + " is written, and setBytes memory is read only");
    if (binding.size() < argument.min_bytes) {
      fail(title + ": " + name + " has " + std::to_string(binding.size()) +
           " bytes, the shader's type needs " + std::to_string(argument.min_bytes));
    }
    if (argument.min_bytes > 0 && binding.offset % 4 != 0) {
      fail(title + ": " + name + " is bound at offset " + std::to_string(binding.offset) +
           ", a reference argument needs a multiple of 4");
    }
  }
}

// Whether a kernel has such an argument.
bool takes_threadgroup_memory(const msl_kernel& kernel, unsigned index) {
  for (int i = 0; i < kernel.argument_count; i++) {
    const msl_argument& argument = kernel.arguments[i];
    if (argument.kind != MSL_BUFFER && argument.index == static_cast<int>(index)) return true;
  }
  return false;
}

void check_threadgroup_memory(const Command& command) {
  size_t total = 0;
  for (size_t bytes : command.threadgroup_bytes) total += bytes;
  if (total > kMaxThreadgroupMemory) {
    fail(std::string(command.kernel->name) + ": " + std::to_string(total) +
         " bytes of threadgroup memory are over the limit of " + std::to_string(kMaxThreadgroupMemory));
  }
  for (unsigned i = 0; i < kMaxBindings; i++) {
    if (command.threadgroup_bytes[i] == 0 || takes_threadgroup_memory(*command.kernel, i)) continue;
    fail(std::string(command.kernel->name) + ": threadgroup(" + std::to_string(i) + ") is still set to " +
         std::to_string(command.threadgroup_bytes[i]) +
         " bytes by a command before: the encoder, which torch's kernels share, keeps a length until it is "
         "set to 0");
  }
}

// --- execution

// The threadgroups of the grid. Indirect grids are read now: an earlier command may have written them.
std::array<size_t, 3> threadgroups(const Command& command) {
  std::array<size_t, 3> groups = command.grid;
  if (command.kind == GridKind::kThreads) {
    for (int i = 0; i < 3; i++) groups[i] = (command.grid[i] + command.threads[i] - 1) / command.threads[i];
  } else if (command.kind == GridKind::kIndirect) {
    uint32_t counts[3];
    memcpy(counts, command.indirect.memory->data + command.indirect.offset, sizeof(counts));
    std::copy(counts, counts + 3, groups.begin());
  }
  return groups;
}

msl_dispatch describe(const Command& command, const std::array<size_t, 3>& groups, uint64_t seed) {
  msl_dispatch dispatch{};
  dispatch.kernel = command.kernel;
  dispatch.seed = seed;
  for (int i = 0; i < 3; i++) {
    dispatch.grid[i] = static_cast<unsigned>(groups[i]);
    dispatch.threads[i] = static_cast<unsigned>(command.threads[i]);
    dispatch.total_threads[i] =
        command.kind == GridKind::kThreads ? static_cast<unsigned>(command.grid[i]) : 0;
  }
  if (command.kind == GridKind::kIndirect)
    dispatch.indirect = command.indirect.memory->data + command.indirect.offset;
  for (unsigned i = 0; i < kMaxBindings; i++) {
    const Binding& from = command.buffers[i];
    msl_binding& to = dispatch.buffers[i];
    to.data = from.memory ? from.memory->data + from.offset : from.bytes ? from.bytes->data() : nullptr;
    to.size = from.size();
    to.identity = from.memory ? from.memory->identity : 0;
    dispatch.threadgroup_bytes[i] = command.threadgroup_bytes[i];
  }
  return dispatch;
}

// The memory that a command reads and writes.
std::shared_ptr<Use> use_of(const Command& command) {
  std::vector<UsedMemory> all;
  const auto add = [&all](const Binding& binding, bool writes) {
    if (binding.memory) all.push_back({binding.memory, binding.offset, writes});
  };
  if (command.kind == GridKind::kIndirect) add(command.indirect, false);
  for (int i = 0; i < command.kernel->argument_count; i++) {
    const msl_argument& argument = command.kernel->arguments[i];
    if (argument.kind == MSL_BUFFER) add(command.buffers[argument.index], argument.writable);
  }
  return use_of(command.kernel->name, all);
}

// A command run again on copies of memory, in which some bytes are others.
class OtherRun {
 public:
  OtherRun(const Command& command, const msl_dispatch& dispatch, const RunningCommand::Doubt& doubt)
      : command_(command) {
    each_binding([&](const Binding& binding, bool writes, int) {
      const Memory& memory = *binding.memory;
      if (writes || &memory == doubt.memory) copies_.try_emplace(&memory, memory.data, memory.size);
    });
    msl_dispatch other = dispatch;
    each_binding([&](const Binding& binding, bool, int index) {
      const auto copy = copies_.find(binding.memory.get());
      if (copy != copies_.end()) other.buffers[index].data = copy->second.data() + binding.offset;
    });
    const auto doubtful = copies_.find(doubt.memory);
    if (doubtful == copies_.end()) return;
    for (size_t i = doubt.first; i < doubt.end; ++i)
      doubtful->second[i] = static_cast<char>(~doubtful->second[i]);
    msl_counters counters{};
    char message[256];
    has_finding_ = state().plain_execute(&other, &counters, message, sizeof(message)) != 0;
  }

  // Whether the results differ from those of the command, which has run meanwhile.
  bool differs() {
    bool result = has_finding_;
    each_binding([&](const Binding& binding, bool writes, int) {
      const Memory& memory = *binding.memory;
      result = result || (writes && memcmp(copies_.at(&memory).data(), memory.data, memory.size) != 0);
    });
    return result;
  }

 private:
  template <typename Call>
  void each_binding(Call call) const {
    for (int i = 0; i < command_.kernel->argument_count; i++) {
      const msl_argument& argument = command_.kernel->arguments[i];
      if (argument.kind != MSL_BUFFER || !command_.buffers[argument.index].memory) continue;
      call(command_.buffers[argument.index], argument.writable, argument.index);
    }
  }

  const Command& command_;
  std::map<const Memory*, std::string> copies_;
  bool has_finding_ = false;
};

// The finding, "" if there is none.
std::string execute(const Command& command) {
  State& s = state();
  if (!s.execute) return "the MSL executor is not loaded";
  const auto groups = threadgroups(command);
  if (std::find(groups.begin(), groups.end(), 0) != groups.end()) return "";  // an indirect grid may be empty
  const RunningCommand running(command.use);
  const msl_dispatch dispatch = describe(command, groups, s.seed);
  std::vector<OtherRun> others;
  for (const auto& doubt : running.doubtful) others.emplace_back(command, dispatch, doubt);
  msl_counters counters{};
  std::string message(16384, '\0');
  const int findings = s.execute(&dispatch, &counters, message.data(), message.size());
  if (findings) {
    const std::string text = message.c_str();
    const bool named = text.find(command.kernel->name) != std::string::npos;
    return named ? text : command.kernel->name + (": " + text);
  }
  for (size_t i = 0; i < others.size(); ++i)
    if (others[i].differs()) running.doubtful[i].is_read();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.counting) return "";
  s.counted.push_back({command.kernel->name, counters});
  return "";
}

bool is_empty(const CommandBuffer& buffer) {
  return buffer.commands.empty() && buffer.completed.empty() && !buffer.has_run;
}

std::shared_ptr<CommandBuffer> new_buffer() {
  const auto made = std::make_shared<CommandBuffer>();
  made->line = new_line();
  return made;
}

// Under the mutex, as what follows.
std::shared_ptr<Encoding> stream_of(State& s, StreamNumber stream) {
  std::shared_ptr<Encoding>& found = s.streams[stream];
  if (!found) found = std::make_shared<Encoding>(Encoding{stream, nullptr});
  return found;
}

CommandBuffer& open_of(Encoding& into) {
  if (!into.open) into.open = new_buffer();
  return *into.open;
}

// Gives the GPU what is committed, up to a buffer that is only enqueued.
void give(State& s, const std::shared_ptr<CommandBuffer>& buffer, StreamNumber queue) {
  Buffers& places = s.enqueued[queue];
  if (buffer->status == Status::kNotEnqueued) places.push_back(buffer);
  buffer->status = Status::kCommitted;
  buffer->committed = s.host;
  const auto is_open = [](const auto& each) { return each->status != Status::kCommitted; };
  const auto end = std::find_if(places.begin(), places.end(), is_open);
  for (auto each = places.begin(); each != end; ++each) {
    commit_line((*each)->line);
    s.committed.push_back(*each);
  }
  places.erase(places.begin(), end);
}

enum class By { kTorch, kWaitOfTorch, kGraph };

// Ends the buffer that a stream has open.
void commit_open(State& s, Encoding& stream, By by) {
  if (!stream.open || is_empty(*stream.open)) return;
  if (by != By::kGraph) torch_commits(*stream.open, stream.queue, by == By::kWaitOfTorch);
  give(s, std::exchange(stream.open, nullptr), stream.queue);
}

void commit_all(State& s, By by) {
  for (auto& [number, stream] : s.streams) commit_open(s, *stream, by);
}

// Whether what is committed runs on a thread of the GPU's own. Under the mutex.
bool has_own_thread(const State& s) {
  return s.runs_alone && !s.timed && !s.tracing;
}

// The committed buffers; none for a thread of the GPU's own that begins late, in a trace or timeline. A trace
// gets the line `event` unless it is empty.
Buffers take_committed(const char* event, bool is_alone) {
  State& s = state();
  Buffers buffers;
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!is_alone || has_own_thread(s)) buffers.swap(s.committed);
  s.running = true;
  const auto is_kernel = [](const Command& command) { return command.kernel != nullptr; };
  const auto has_commands = [&](const auto& buffer) {
    return std::any_of(buffer->commands.begin(), buffer->commands.end(), is_kernel);
  };
  if (s.tracing && std::any_of(buffers.begin(), buffers.end(), has_commands)) s.trace += event;
  return buffers;
}

// Whether a buffer's kernels need more memory than the GPU may have at once.
bool is_too_large(const CommandBuffer& buffer) {
  size_t bytes = 0;
  for (const auto& [identity, size] : buffer.used) bytes += size;
  return bytes > state().working_set;
}

// What a test wants of the next buffer.
Failure next_failure() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.most_timeouts != 0 && s.timeouts >= s.most_timeouts) return Failure::kIgnored;
  if (s.failure == Failure::kNone || s.before_failure-- > 0) return Failure::kNone;
  s.failed = true;
  s.before_failure = 0;
  return --s.failures == 0 ? std::exchange(s.failure, Failure::kNone) : s.failure;
}

void end(CommandBuffer& buffer, Failure failure) {
  buffer.commands.clear();
  buffer.borrowed.clear();
  end_line(buffer.line);
  buffer.last = last_run();
  buffer.failure = failure;
  buffer.status = failure == Failure::kNone ? Status::kCompleted : Status::kError;
  for (const auto& each : buffer.ended) each();
  buffer.ended.clear();
}

// Copies of a buffer appear in the host's memory.
void show(CommandBuffer& buffer) {
  std::vector<std::function<void()>> visible;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    visible.swap(buffer.visible);
  }
  for (const auto& each : visible) each();
}

// The same of all buffers whose end the host knows, because it has waited for one behind them.
void show_ended() {
  State& s = state();
  Buffers ended;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    const auto is_later = [&s](const auto& buffer) { return s.timed && buffer->end > s.host; };
    const auto first = std::stable_partition(s.unseen.begin(), s.unseen.end(), is_later);
    ended.assign(first, s.unseen.end());
    s.unseen.erase(first, s.unseen.end());
  }
  for (const auto& buffer : ended) {
    host_hears(buffer->last);
    show(*buffer);
  }
}

void tell(CommandBuffer& buffer) {
  if (buffer.tells_host) host_hears(buffer.last);
  show(buffer);
  for (const auto& handler : buffer.completed) handler();
  buffer.completed.clear();
  buffer.object.reset();
}

// How long after a buffer's end its handlers are called where they are late; at most, where it is drawn.
constexpr std::chrono::microseconds kLate(200);

// Calls a function late, on a thread of its own.
void later(std::function<void()> call) {
  std::chrono::microseconds late = kLate;
  {
    static const int forked = pthread_atfork(wait_for_handlers, nullptr, nullptr);
    std::lock_guard<std::mutex> lock(state().mutex);
    state().telling += forked + 1;
    if (state().runs_alone) late = std::chrono::microseconds(state().drawn() % (kLate.count() + 1));
  }
  std::thread([call = std::move(call), late] {
    std::this_thread::sleep_for(late);
    call();
    std::lock_guard<std::mutex> lock(state().mutex);
    --state().telling;
    state().told.notify_all();
  }).detach();
}

// Calls the handlers of buffers that have ended, where the schedule says so late and in another order.
void tell(const Buffers& buffers) {
  State& s = state();
  if (s.seed % 4 < 2) {
    for (const auto& buffer : buffers) tell(*buffer);
    return;
  }
  later([buffers] {
    for (auto buffer = buffers.rbegin(); buffer != buffers.rend(); ++buffer) tell(**buffer);
  });
}

// Calls the handlers of buffers that have ended by the host's clock, or of all.
void tell_ended(bool all = false) {
  State& s = state();
  Buffers ended;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto is_later = [&](const auto& buffer) { return !all && s.timed && buffer->end > s.host; };
    const auto first = std::stable_partition(s.untold.begin(), s.untold.end(), is_later);
    ended.assign(first, s.untold.end());
    s.untold.erase(first, s.untold.end());
  }
  for (const auto& buffer : ended) tell(*buffer);
}

// Seconds of the GPU's clock that a buffer may wait and work: macOS ends it then.
constexpr double kWatchdog = 5;

// Whether macOS has ended a buffer that has begun, which it does at its limit. Without a clock of the host
// nothing lasts.
bool is_too_long(const CommandBuffer& buffer) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.timed || s.clock - buffer.start <= kWatchdog) return false;
  s.clock = buffer.start + kWatchdog;
  return true;
}

enum class Ran { kAll, kUpToFinding, kUpToWait, kTooLong };

// macOS runs nothing more of the process.
bool is_ignoring() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().most_timeouts != 0 && state().timeouts >= state().most_timeouts;
}

// Runs what host code's own queues have committed. The GPU does so beside all streams; their clock stays.
void run_hosts() {
  State& s = state();
  Buffers buffers;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    const auto is_of_streams = [](const auto& buffer) { return !buffer->is_hosts; };
    const auto first = std::stable_partition(s.committed.begin(), s.committed.end(), is_of_streams);
    buffers.assign(first, s.committed.end());
    s.committed.erase(first, s.committed.end());
  }
  if (buffers.empty()) return;
  for (const auto& buffer : buffers) {
    for (const Command& command : buffer->commands) {
      const std::string finding = s.dropping ? "" : execute(command);
      if (!finding.empty()) report(finding);
    }
    buffer->start = buffer->end = s.clock;
    end(*buffer, is_ignoring() ? Failure::kIgnored : Failure::kNone);
  }
  later([buffers] {
    for (const auto& buffer : buffers) tell(*buffer);
  });
}

// The GPU waits for a signal, and runs what host code's own queues get meanwhile. Returns: false where macOS
// has ended the buffer before, by the watchdog of a GPU with a thread of its own.
bool run_beside(const Command& waiting, const CommandBuffer& buffer) {
  using Seconds = std::chrono::duration<double>;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto end = now() + Seconds(longest_wait());
  const double limit = state().watchdog;
  while (waiting.waits() && now() < end) {
    if (limit > 0 && now() - buffer.began > Seconds(limit)) return false;
    tell_failed();
    run_hosts();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// The next synchronisation raises a finding, and no command behind it runs. With `stops`, no command runs
// behind a wait for an event that nobody has signalled yet: they stay.
Ran run(CommandBuffer& buffer, bool stops = false) {
  std::vector<Command>& commands = buffer.commands;
  for (size_t i = 0; i < commands.size(); i++) {
    if (buffer.has_begun && is_too_long(buffer)) return Ran::kTooLong;
    Command& command = commands[i];
    if (command.act) {
      {
        const RunningCommand running(command.use);
        command.act();
      }
      command.use.reset();
      continue;
    }
    if (command.event) {
      if (stops && command.waits && command.waits()) {
        commands.erase(commands.begin(), commands.begin() + static_cast<long>(i));
        return Ran::kUpToWait;
      }
      if (command.waits && !run_beside(command, buffer)) return Ran::kTooLong;
      if (!command.event()) return Ran::kUpToFinding;
      continue;
    }
    const std::string finding = execute(command);
    command.use.reset();
    if (finding.empty()) continue;
    report(finding);
    return Ran::kUpToFinding;
  }
  return buffer.has_begun && is_too_long(buffer) ? Ran::kTooLong : Ran::kAll;
}

// The GPU goes on at this time of its clock, if that is to come.
void gpu_hears_at(double time) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.waited += std::max(0.0, time - s.clock);
  s.clock = std::max(s.clock.load(), time);
}

// The signals and waits alone.
void run_events(const std::vector<Command>& commands) {
  for (const Command& command : commands) {
    if (command.event && !command.event()) return;
  }
}

// The GPU begins a buffer once it has been given it and has ended those before it. Some of it may have run.
void begin(CommandBuffer& buffer) {
  State& s = state();
  if (s.timed) {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.idle += std::max(0.0, buffer.committed - s.clock);
    s.clock = std::max(s.clock.load(), buffer.committed);
  }
  buffer.status = Status::kScheduled;
  if (!buffer.scheduled.empty()) tell_listeners(std::exchange(buffer.scheduled, {}));
  buffer.start = s.clock;
  gpu_hears_at(buffer.signalled);
  s.clock = s.clock + buffer.seconds;
}

// Runs what the open buffers have, which stay open: their time comes once they are committed.
void run_open() {
  State& s = state();
  Buffers open;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    for (const auto& [number, stream] : s.streams) {
      if (stream->open && !stream->open->commands.empty()) open.push_back(stream->open);
    }
  }
  for (const auto& buffer : open) {
    const double before = s.clock;
    s.opened = buffer.get();
    run(*buffer);
    host_hears(last_run());
    s.opened = nullptr;
    buffer->commands.clear();
    buffer->has_run = true;
    buffer->seconds += s.clock - before;
    s.clock = before;
  }
}

// Buffers from `first` on stay committed.
void put_back(const Buffers& buffers, Buffers::const_iterator first) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().committed.insert(state().committed.begin(), first, buffers.end());
}

// One thread runs commands at a time: what another one runs is complete when this one goes on.
class Runner {
 public:
  // `is_alone`: the thread is the GPU's own.
  explicit Runner(bool is_alone) {
    while (true) {
      bool others_alone = false;
      {
        const std::lock_guard<std::mutex> lock(who());
        if (gpu().try_lock()) {
          before_ = std::exchange(gpu_is_alone, is_alone);
          return;
        }
        others_alone = gpu_is_alone;
      }
      if (is_alone || (others_alone && state().execute == state().plain_execute)) {
        std::this_thread::sleep_for(kLate / 10);  // a wait as torch's, with Python's lock or not
        continue;
      }
      const WaitForQueue waiting;  // whoever runs may need Python's lock
      gpu().lock();
      return;
    }
  }
  ~Runner() {
    const std::lock_guard<std::mutex> lock(who());
    gpu_is_alone = before_;
    gpu().unlock();
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

 private:
  static std::recursive_mutex& gpu() {
    static std::recursive_mutex& made = *new std::recursive_mutex;
    return made;
  }
  // Held where one begins or ends: whoever finds `gpu` locked knows by whom.
  static std::mutex& who() {
    static std::mutex& made = *new std::mutex;
    return made;
  }
  inline static bool gpu_is_alone = false;  // the GPU's own thread runs
  bool before_ = false;
};

// `stands_in`: for an operator that the GPU would run; the host is not told what has ended. `stops`: where
// the GPU would wait for an event, as the host does not.
// `is_alone`: on the GPU's own thread; the host hears of nothing but handlers and signals.
void run(const char* event, bool stands_in = false, bool stops = false, bool is_alone = false) {
  const Runner runner(is_alone);
  run_hosts();
  const Buffers buffers = take_committed(event, is_alone);
  struct Finish {
    ~Finish() {
      std::lock_guard<std::mutex> lock(state().mutex);
      state().running = false;
    }
  } finish;
  bool runs = !state().dropping, has_victims = false;
  for (auto each = buffers.begin(); each != buffers.end(); ++each) {
    const auto& buffer = *each;
    if (!std::exchange(buffer->has_begun, true)) {
      buffer->began = std::chrono::steady_clock::now();
      buffer->failure = has_victims ? Failure::kVictim : next_failure();
      if (buffer->failure == Failure::kNone && is_too_large(*buffer)) buffer->failure = Failure::kOutOfMemory;
      begin(*buffer);
    }
    if (runs && buffer->failure == Failure::kNone) {
      const Ran ran = run(*buffer, stops);
      if (ran == Ran::kUpToWait) {
        put_back(buffers, each);
        break;
      }
      if (ran == Ran::kTooLong) buffer->failure = Failure::kTimeout;
      runs = ran != Ran::kUpToFinding;
    }
    if (state().dropping) run_events(buffer->commands);
    buffer->end = state().clock;
    end(*buffer, buffer->failure);
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (buffer->failure == Failure::kTimeout) {
      ++state().timeouts;
      has_victims = state().fails_victims;
    }
    if (!buffer->visible.empty()) state().unseen.push_back(buffer);
    state().untold.push_back(buffer);
  }
  if (!stops && !stands_in && !is_alone) host_hears(last_run());
  if (stands_in && !state().timed && state().seed % 4 < 2) return;
  if (state().timed || state().seed % 4 < 2) return tell_ended();
  Buffers ended;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    ended.swap(state().untold);
  }
  if (!ended.empty()) tell(ended);
}

}  // namespace

std::string text_of(Failure failure) {
  switch (failure) {
    case Failure::kNone: return "";
    case Failure::kVictim:
      return "Discarded (victim of GPU error/recovery) "
             "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)";
    case Failure::kTimeout:
      return "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)";
    case Failure::kFault:
      return "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)";
    case Failure::kIgnored:
      return "Ignored (for causing prior/excessive GPU errors) "
             "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)";
    case Failure::kOutOfMemory:
      return "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)";
  }
}

namespace {
// Of one that does not retain the memory of its commands, host code does until it ends.
void borrow(CommandBuffer& buffer, const std::vector<std::shared_ptr<Memory>>& used) {
  if (buffer.retains) return;
  for (const auto& memory : used) {
    if (!memory) continue;
    ++memory->lent;
    buffer.borrowed.push_back(std::shared_ptr<void>(memory.get(), [memory](void*) { --memory->lent; }));
  }
}
}  // namespace

void record(const Command& command, Encoding& into) {
  State& s = state();
  if (forgetting()) return;
  if (s.validating) {
    check_threads(command);
    check_arguments(command);
    check_threadgroup_memory(command);
  }
  const std::shared_ptr<Use> use = use_of(command);
  std::lock_guard<std::mutex> lock(s.mutex);
  CommandBuffer& open = open_of(into);
  if (!open.is_hosts) {  // what a test looks at is torch's streams
    if (s.tracing) s.trace += trace_text(command) + "\n";
    s.host += s.a_command;
  }
  open.commands.emplace_back(command).use = use;
  add_step(*open.line, use, nullptr);
  if (s.working_set != SIZE_MAX) {
    for (const Binding& each : command.buffers)
      if (each.memory) open.used[each.memory->identity] = each.memory->size;
  }
  if (open.retains) return;
  for (const Binding& each : command.buffers) borrow(open, {each.memory});
}

namespace {
void count_operator(State& s, Encoding& into) {
  if (!s.timed) return;
  s.host += s.a_command;
  CommandBuffer& open = open_of(into);
  open.has_run = true;
  open.seconds += s.an_operator;
}
// Of no kernel.
CommandBuffer& record_act(std::function<void()> act, const std::shared_ptr<Use>& use, Encoding& into) {
  CommandBuffer& open = open_of(into);
  Command& command = open.commands.emplace_back();
  command.act = std::move(act);
  command.use = use;
  add_step(*open.line, use, nullptr);
  return open;
}
}  // namespace

void record_operator(StreamNumber stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  count_operator(state(), *stream_of(state(), stream));
}

void record_copy(std::function<void()> act, std::function<void()> appears, const std::shared_ptr<Use>& use,
                 StreamNumber stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  Encoding& into = *stream_of(state(), stream);
  count_operator(state(), into);
  record_act(std::move(act), use, into).visible.push_back(std::move(appears));
}

void record_blit(const char* name, const Binding& source, const Binding& destination,
                 std::function<void()> act, Encoding& into) {
  if (forgetting()) return;
  std::vector<UsedMemory> all = {{destination.memory, destination.offset, true}};
  if (source.memory) all.push_back({source.memory, source.offset, false});
  const std::shared_ptr<Use> use = use_of(name, all);
  const std::lock_guard<std::mutex> lock(state().mutex);
  count_operator(state(), into);
  borrow(record_act(std::move(act), use, into), {source.memory, destination.memory});
}

void record_barrier() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.tracing) s.trace += "barrier\n";
}

void record_event(const char* text, std::function<bool()> event, std::function<bool()> waits,
                  Encoding& into) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.tracing) s.trace += std::string(text) + "\n";
  s.host += s.a_command;
  CommandBuffer& open = open_of(into);
  if (waits) add_step(*open.line, nullptr, waits);
  Command& command = open.commands.emplace_back();
  command.event = std::move(event);
  command.waits = std::move(waits);
}

double gpu_clock() {
  return state().clock;
}

double answer_clock() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().answer;
}

void gpu_hears(double signalled) {
  State& s = state();
  if (!s.timed) return;
  const double heard = signalled + s.an_event;
  if (s.opened == nullptr) return gpu_hears_at(heard);
  s.opened->signalled = std::max(s.opened->signalled, heard);
}

void answer_hears(double signalled) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.answer = std::max(s.answer, signalled + s.an_event);
}

void tell_failed() {
  State& s = state();
  Buffers failed;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    const auto is_other = [](const auto& buffer) { return buffer->failure == Failure::kNone; };
    const auto first = std::stable_partition(s.untold.begin(), s.untold.end(), is_other);
    failed.assign(first, s.untold.end());
    s.untold.erase(first, s.untold.end());
  }
  if (!failed.empty()) tell(failed);
}

void tell_listeners(std::vector<std::function<void()>> blocks) {
  // A timeline's clocks are read where they stand.
  if (state().timed || (state().seed % 4 < 2 && !state().runs_alone)) {
    for (const auto& block : blocks) block();
    return;
  }
  later([blocks = std::move(blocks)] {
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) (*block)();
  });
}

size_t thread_limit(const msl_kernel& kernel) {
  return std::min(kernel.max_threads ? kernel.max_threads : kUndeclaredThreads, state().most_threads);
}

bool dropping() {
  return state().dropping;
}

bool forgetting() {
  const State& s = state();
  return s.dropping && !s.validating && !s.tracing;
}

bool has_pending() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.timed && !s.untold.empty()) return true;
  if (s.running || !s.committed.empty()) return true;
  return std::any_of(s.streams.begin(), s.streams.end(), [](const auto& stream) {
    return stream.second->open && !is_empty(*stream.second->open);
  });
}

namespace {
// What is committed runs where the GPU has begun before the host's next line.
void begin_committed() {
  State& s = state();
  bool runs_alone;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    runs_alone = has_own_thread(s);
  }
  if (runs_alone) return later([] { run("", false, false, true); });
  if (s.seed % 2 == 1) run("", false, true);
}
}  // namespace

void commit(StreamNumber stream) {
  State& s = state();
  check_encoder(*encoding_of(stream));
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.commits++;
    if (s.tracing) s.trace += "commit\n";
    commit_open(s, *stream_of(s, stream), By::kTorch);
  }
  begin_committed();
}

void commit(const std::shared_ptr<CommandBuffer>& buffer, StreamNumber queue) {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    give(state(), buffer, queue);
  }
  begin_committed();
}

void enqueue(const std::shared_ptr<CommandBuffer>& buffer, StreamNumber queue) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  buffer->status = Status::kEnqueued;
  state().enqueued[queue].push_back(buffer);
}

void commit_unseen(StreamNumber stream) {
  end_encoder(*encoding_of(stream));
  std::lock_guard<std::mutex> lock(state().mutex);
  commit_open(state(), *stream_of(state(), stream), By::kGraph);
}

std::shared_ptr<Encoding> encoding_of(StreamNumber stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return stream_of(state(), stream);
}

bool is_of_torch(const Encoding& encoding) {
  return encoding_of(encoding.queue).get() == &encoding;
}

std::shared_ptr<Encoding> new_encoding(StreamNumber queue, bool retains, bool is_hosts) {
  const auto made = std::make_shared<Encoding>(Encoding{queue, new_buffer()});
  made->open->retains = retains;
  made->open->is_hosts = is_hosts;
  return made;
}

std::shared_ptr<CommandBuffer> open_buffer(StreamNumber stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = stream_of(state(), stream);
  open_of(*found);
  return found->open;
}

namespace {
constexpr char kBehind[] = " waits for a command buffer behind one that is enqueued and not committed";
}  // namespace

void run_before_operator(bool waits) {
  if (!state().timed) {
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      commit_all(state(), waits ? By::kWaitOfTorch : By::kTorch);
    }
    return run("synchronize\n", true);
  }
  run("");
  run_open();
}

void run_pending() {
  {
    const StreamNumber waiting = current_stream();
    std::lock_guard<std::mutex> lock(state().mutex);
    commit_open(state(), *stream_of(state(), waiting), By::kWaitOfTorch);  // another stream's stays open
  }
  run("synchronize\n");
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& each : state().enqueued[current_stream()])
    if (each->status == Status::kCommitted) return report(std::string("synchronize") + kBehind);
}

namespace {
// The host has waited for what the GPU ends then. Under the mutex.
void hears_of_end(State& s, double end) {
  if (end > s.host) s.host = end + s.an_end;
}
}  // namespace

void wait_for(const CommandBuffer& buffer) {
  State& s = state();
  if (buffer.status < Status::kCommitted)
    fail("waitUntilCompleted: the command buffer is not committed, so that nothing would end the wait");
  if (buffer.status <= Status::kScheduled) run("wait\n");
  if (buffer.status == Status::kCommitted) fail(std::string("waitUntilCompleted") + kBehind);
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    hears_of_end(s, buffer.end);
  }
  show_ended();
  tell_ended();
}

void wait_for_all() {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    hears_of_end(s, s.clock);
  }
  host_hears(last_run());
  show_ended();
  tell_ended();
}

void wait_for_handlers() {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  s.told.wait(lock, [&s] { return s.telling == 0; });
}

}  // namespace simulator

using simulator::state;

extern "C" {
void simulator_set_executor(simulator_execute execute) {
  if (!state().execute) state().plain_execute = execute;
  state().execute = execute;
}
void simulator_set_schedule(uint64_t seed) {
  simulator::wait_for_handlers();
  state().seed = seed;
}

void simulator_run_alone(int on, uint64_t seed, double watchdog) {
  simulator::wait_for_handlers();
  state().watchdog = watchdog;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().runs_alone = on;
  state().drawn.seed(static_cast<unsigned>(seed) + 1);
}

void simulator_commit_unseen(void) {
  simulator::commit_unseen(simulator::current_stream());
}

void simulator_limit_pipelines(size_t threads) {
  state().most_threads = threads;
}

void simulator_set_dropping(int dropping, int validating) {
  state().dropping = dropping;
  state().validating = validating;
}

void simulator_fail_buffer(uint64_t after, int code, uint64_t count) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.failure = static_cast<simulator::Failure>(code);
  s.before_failure = after;
  s.failures = count;
  s.failed = false;
}

void simulator_ignore_buffers(uint64_t timeouts, int victims) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.most_timeouts = timeouts;
  s.timeouts = 0;
  s.fails_victims = victims;
}

void simulator_limit_working_set(size_t bytes) {
  state().working_set = bytes;
}

void simulator_advance_clock(double seconds) {
  state().clock = state().clock + seconds;
}

void simulator_time_host(int timed, double a_command, double an_operator) {
  simulator::tell_ended(true);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.timed = timed;
  s.a_command = a_command;
  s.an_operator = an_operator;
  s.host = s.answer = s.clock;
  s.idle = s.waited = 0;
}

void simulator_advance_host(double seconds) {
  auto& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.host += seconds;
  }
  simulator::tell_ended();
}

double simulator_host_clock(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().host;
}

double simulator_clock(void) {
  return state().clock;
}

double simulator_idle(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().idle;
}

void simulator_time_events(double an_event, double an_end) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().an_event = an_event;
  state().an_end = an_end;
}

double simulator_waited(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().waited;
}

void simulator_advance_answer(double seconds) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().answer += seconds;
}

double simulator_answer_clock(void) {
  return simulator::answer_clock();
}

int simulator_has_failed(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().failed;
}

void simulator_reset(void) {
  auto& s = state();
  simulator::Buffers dropped;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    commit_all(s, simulator::By::kGraph);
    dropped.swap(s.committed);
    for (const auto& [queue, places] : std::exchange(s.enqueued, {}))
      dropped.insert(dropped.end(), places.begin(), places.end());
    s.tracing = s.counting = false;
    s.failure = simulator::Failure::kNone;
  }
  simulator::tell_ended(true);
  for (const auto& buffer : dropped) {
    simulator::end(*buffer, simulator::Failure::kNone);
    simulator::tell(*buffer);
  }
  simulator::wait_for_handlers();
  simulator::take_reports();
}

void simulator_trace_start(void) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.trace.clear();
  s.trace_names.clear();
  s.tracing = true;
}

const char* simulator_trace_stop(void) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.tracing = false;
  return s.trace.c_str();
}

void simulator_counters_start(void) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.counted.clear();
  s.counting = true;
}

const simulator_dispatch_counters* simulator_counters_stop(size_t* count) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.counting = false;
  *count = s.counted.size();
  return s.counted.data();
}

void* simulator_contents(const void* buffer) {
  return simulator::buffer_contents(buffer);
}
uint64_t simulator_commits(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().commits;
}
size_t simulator_live_buffers(void) {
  simulator::wait_for_handlers();
  return simulator::live_buffers() - simulator::torch_memory::free_buffers();
}
long simulator_live_objects(void) {
  simulator::wait_for_handlers();
  const size_t kept = simulator::torch_memory::free_buffers() + simulator::torch_memory::heaps();
  return simulator::live_objects() - static_cast<long>(kept);
}
}
