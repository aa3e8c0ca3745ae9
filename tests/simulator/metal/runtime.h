// What the parts of the simulated Metal runtime share: memory, recorded commands, findings.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../msl/executor.h"

namespace simulator {

// --- findings (device/python.cpp)

// Raises SimulatorError in the caller.
[[noreturn]] void fail(const std::string& message);
// Whether host code has to keep to PyTorch's own stream, safe math and language 3.1 (runtime.py: install).
bool is_strict();
// The macOS that is simulated: SIMULATED_MACOS in the environment, or 26.
int macos();
// The line of Python that the calling thread runs: "file:number", or "" where it runs none.
std::string python_line();
bool has_python();  // the calling thread has Python's lock
// Keeps a finding for the next synchronisation, where raising now is not possible.
void report(const std::string& message);
// The reported findings, one a line; forgets them.
std::string take_reports();

// --- shaders (device/python.cpp)

// Translates and compiles MSL; the path of the library, or "" with the compiler's message in `error`.
std::string compile_shader(const std::string& source, std::string& error);

// --- pages that not everybody may touch (device/poison.cpp)

constexpr size_t kPage = 4096;

// Whoever touches one that is closed calls `touched`, which opens it, and goes on.
class Pages {
 public:
  using Touched = std::function<void(const char* address, bool writes)>;
  Pages(char* data, size_t size, Touched touched);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  void protect(int protection);  // all, from here on
  void open(size_t page, int protection);
  bool note(const char* address, bool writes);  // of a fault: whether it is this memory's

 private:
  char* const data_;
  const size_t size_;
  const Touched touched_;
  std::atomic<int> protection_;
  std::atomic<bool> is_opened_ = false;  // some of them
};

// Memory that nobody may read yet: a copy's of torch.
class Poison {
 public:
  Poison(char* data, size_t size);
  void close();
  void open();
  bool was_read() { return is_read_.exchange(false); }  // since then

  std::string line;  // of Python, for a finding

 private:
  std::atomic<bool> is_read_ = false;
  Pages pages_;
};

// --- memory (buffer.mm)

struct Guarded;

struct Memory {
  explicit Memory(size_t bytes);
  Memory(char* data, size_t bytes, std::function<void()> release);  // the host's own
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data;  // for the GPU
  const size_t size;
  const uint64_t identity;
  const std::function<void()> release = nullptr;
  bool is_hosts = false;  // host code's own, which only its own queues use

  std::atomic<int> lent = 0;  // commands of buffers that do not retain it
  // Guarded (guards.cpp):
  int reading = 0, writing = 0;      // commands that may run, or have run and the host has not heard of it
  std::shared_ptr<Guarded> guarded;  // once the host has asked for the contents
};

// --- who may touch memory (guards.cpp)

void* contents_for_host(Memory& memory);
// Copies what host code reads from a file. Returns: false where the memory is none that it has asked for.
// From here on nothing else that the host writes there is looked at.
bool host_copies(void* to, const void* from, size_t size);
bool is_for_host(const void* address);

struct Use;   // of memory, by a command
struct Line;  // the commands of a command buffer
struct UsedMemory {
  std::shared_ptr<Memory> memory;
  size_t offset;  // it is used from there on
  bool writes;
};
std::shared_ptr<Use> use_of(const char* kernel, const std::vector<UsedMemory>& all);
std::shared_ptr<Line> new_line();
void add_step(Line& line, const std::shared_ptr<Use>& use, std::function<bool()> waits);  // one of them
void commit_line(const std::shared_ptr<Line>& line);
void end_line(const std::shared_ptr<Line>& line);
void event_changed();

// While it lives the GPU runs a command.
class RunningCommand {
 public:
  explicit RunningCommand(const std::shared_ptr<Use>& use);
  ~RunningCommand();
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;

  // Bytes that the host has read from a file meanwhile, and what to call if the command reads them.
  struct Doubt {
    const Memory* memory;
    size_t first, end;
    std::function<void()> is_read;
  };
  std::vector<Doubt> doubtful;

 private:
  const std::shared_ptr<Use> use_;
};
uint64_t last_run();               // the number of the last command that has run
void host_hears(uint64_t number);  // that it has

// While it lives, the thread is torch, to which the device, its memory, command buffers and encoders belong.
struct AsTorch {
  AsTorch();
  ~AsTorch();
  AsTorch(const AsTorch&) = delete;
  AsTorch& operator=(const AsTorch&) = delete;
  static bool is_there();
};

// Untyped handles of MTLBuffer objects, for the PyTorch side, which is plain C++.
void* buffer_new(size_t bytes);
size_t recommended_bytes();  // of the GPU's memory (device/torch_memory.mm)
void buffer_release(void* buffer);
void* buffer_contents(const void* buffer);
std::shared_ptr<Memory> buffer_memory(const void* buffer);  // null unless it is a live MTLBuffer
size_t live_buffers();
size_t live_bytes();

// --- torch (device/torch.cpp, torch_memory.cpp)

namespace torch_memory {
size_t free_buffers();  // that no tensor has: torch keeps them
size_t heaps();
}  // namespace torch_memory

struct CommandBuffer;
// What torch does to a buffer that it commits, and, with `waits`, waits for.
void torch_commits(CommandBuffer& buffer, int64_t stream, bool waits);

// --- commands (commands.cpp)

constexpr unsigned kMaxBindings = 31;
constexpr size_t kMaxThreadgroupMemory = 32 * 1024;
constexpr size_t kMaxSetBytes = 4096;
// What a pipeline allows if its kernel declares nothing: Apple's compiler may go down to this, depending on
// registers.
constexpr size_t kUndeclaredThreads = 384;
// The threads that a pipeline allows: those, or the declared ones, or what a test set as the most.
size_t thread_limit(const msl_kernel& kernel);

struct Binding {
  std::shared_ptr<Memory> memory;  // setBuffer
  size_t offset = 0;
  std::shared_ptr<std::string> bytes;  // setBytes
  bool bound() const { return memory || bytes; }
  size_t size() const { return memory ? memory->size - offset : bytes ? bytes->size() : 0; }
};

enum class GridKind { kThreads, kThreadgroups, kIndirect };

struct Command {
  const msl_kernel* kernel = nullptr;
  std::array<Binding, kMaxBindings> buffers;
  std::array<size_t, kMaxBindings> threadgroup_bytes{};
  std::function<void()> act;    // of a copy, which has no kernel
  std::function<bool()> event;  // of a signal, or a wait for one: whether the GPU goes on
  std::function<bool()> waits;  // whether the GPU would wait now
  std::shared_ptr<Use> use;
  GridKind kind = GridKind::kThreadgroups;
  std::array<size_t, 3> grid{};     // threads or threadgroups
  std::array<size_t, 3> threads{};  // per threadgroup
  Binding indirect;
};

// Metal's numbers.
enum class Status { kNotEnqueued, kEnqueued, kCommitted, kScheduled, kCompleted, kError };
enum class Failure { kNone = 0, kVictim = 1, kTimeout = 2, kFault = 3, kIgnored = 4, kOutOfMemory = 8 };
std::string text_of(Failure failure);  // as macOS describes it

// The commands that the GPU is given together. Those of a buffer that fails do not run.
struct CommandBuffer {
  std::vector<Command> commands;
  std::shared_ptr<Line> line;
  std::vector<std::function<void()>> scheduled;  // called where it begins,
  std::vector<std::function<void()>> ended;      // where it ends,
  std::vector<std::function<void()>> visible;    // once the host knows that it has,
  std::vector<std::function<void()>> completed;  // and of the host's own, which are told of it
  bool tells_host = false;                       // there are some
  bool is_hosts = false;                         // of a queue of host code's own
  bool retains = true;                           // the memory of its commands,
  std::vector<std::shared_ptr<void>> borrowed;   // which is not released before, otherwise
  std::map<uint64_t, size_t> used;               // {identity: bytes} of it, where a test limits them
  Status status = Status::kNotEnqueued;
  Failure failure = Failure::kNone;
  uint64_t last = 0;                            // number of the last command that has run when it ends
  double start = 0, end = 0;                    // by the clock that a test moves on
  double seconds = 0;                           // of what has run before it is committed
  bool has_run = false;                         // there is some
  bool has_begun = false;                       // and may wait for an event
  std::chrono::steady_clock::time_point began;  // by the real clock
  double committed = 0;                         // by the host's clock
  double signalled = 0;          // when what it waited for was, if it has run before it is committed
  std::shared_ptr<void> object;  // what host code knows it by, until it is complete
};

// Streams are numbers: 0 is the default one. Each has a queue and a buffer that is open; they share the GPU.
using StreamNumber = int64_t;

// What commands are recorded into: a command buffer, or those of a stream of torch's, one after the other.
//
// A queue that host code has made for itself has no order with the streams: its buffers run as soon as they
// are committed, also while a stream waits for an event, and use no memory of torch's.
struct Encoding {
  const StreamNumber queue;
  std::shared_ptr<CommandBuffer> open;
  void* encoder = nullptr;  // an object, until it ends
};
std::shared_ptr<Encoding> encoding_of(StreamNumber stream);
std::shared_ptr<Encoding> new_encoding(StreamNumber queue, bool retains, bool is_hosts = false);
void end_encoder(Encoding& encoding);          // that of torch's stream (encoder.mm)
void check_encoder(const Encoding& encoding);  // before a commit: that it has ended
bool is_of_torch(const Encoding& encoding);

StreamNumber current_stream();                        // of the thread
void record(const Command& command, Encoding& into);  // validates; raises SimulatorError
void record_operator(StreamNumber stream);            // of aten, which the CPU has computed in its place
// A copy of the GPU's to the host, which `appears` there once the host knows that its buffer is complete.
void record_copy(std::function<void()> act, std::function<void()> appears, const std::shared_ptr<Use>& use,
                 StreamNumber stream);
void record_barrier();
// A command of a blit encoder, which may have no source.
void record_blit(const char* name, const Binding& source, const Binding& destination,
                 std::function<void()> act, Encoding& into);
// A signal of an event or a wait for one, as `text` in a trace. They run on the null device, too.
void record_event(const char* text, std::function<bool()> event, std::function<bool()> waits, Encoding& into);
std::shared_ptr<CommandBuffer> open_buffer(StreamNumber stream);  // that commands are recorded into
// A GPU may finish committed work before the host's next line, or as late as the next wait. Here the schedule
// decides: with an odd one, the work runs at once. In schedules 2 and 3 of four, handlers are called later,
// by a thread of their own, and the newest buffer's first.
void commit(StreamNumber stream);
// A buffer of host code's own, which runs behind those that were enqueued before in its queue.
void commit(const std::shared_ptr<CommandBuffer>& buffer, StreamNumber queue);
void enqueue(const std::shared_ptr<CommandBuffer>& buffer, StreamNumber queue);
// Ends a stream's buffer as MPSGraph does within a graph, unseen by host code.
void commit_unseen(StreamNumber stream);
// Runs what was recorded, in order. Reports the first finding and forgets the rest.
void run_pending();
// The same for an operator that the CPU computes in the GPU's place, behind which torch may wait. Where the
// host has a clock, what is open stays open.
void run_before_operator(bool waits);
void wait_for(const CommandBuffer& buffer);  // of the host, for one that is committed
void wait_for_all();                         // the host's clock, once all that was committed has run
void wait_for_handlers();
// The encoder that torch shares: the bytes of threadgroup memory that host code has left set in it, which a
// kernel of torch's has on top of its own.
size_t threadgroup_bytes_set();
// The clocks of those who signal: of the GPU while a command runs, and of the host's thread that answers.
double gpu_clock();
double answer_clock();
// Somebody hears of a signal later than it was given: the GPU, which waits, or the thread that answers.
void gpu_hears(double signalled);
void answer_hears(double signalled);
// Calls the handlers of buffers that have failed: while the GPU waits for a signal, only they may give it.
void tell_failed();
double longest_wait();  // for a signal, in seconds of the real clock: a longer one is a finding
// Calls the blocks of listeners, where the schedule says so late and on another thread.
void tell_listeners(std::vector<std::function<void()>> blocks);
bool has_pending();  // something is recorded or waited for, or runs in another thread
bool dropping();     // commands are forgotten where they would run: the null device
bool forgetting();   // they are forgotten, unseen, where they are encoded: it costs the host next to nothing

}  // namespace simulator
