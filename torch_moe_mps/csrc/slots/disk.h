// Experts on a disk: where they lie in files, and the threads that read them. Plain C++: it knows no Metal
// and no Python, whose lock no thread of it takes. What such a thread keeps and frees is memory, never a
// tensor that Python has: the last but one owner of that takes the lock.
#pragma once
#include <ATen/core/Tensor.h>
#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"

namespace moe_mps {

// Why experts cannot be read; no text for no fault.
struct ReadFault {
  std::string why;
  int error = 0;  // of the system; 0 for a file that is not what it was
};

// An open file. What was opened before one that cannot be is closed with it.
class OpenFile {
 public:
  // Another descriptor of the file; below 0 where the process may have no more, as errno says.
  explicit OpenFile(int file);
  OpenFile(OpenFile&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  OpenFile& operator=(OpenFile&&) = delete;
  ~OpenFile();
  int number() const { return number_; }

 private:
  int number_;
};

// Rows of a tensor behind each other in an open file.
struct StoredRows {
  int64_t file, offset, stride, rows;
};

// A tensor of a layer's experts: bytes of one, its parts, and the dtype in the files, where 16 bits may be
// others.
struct StoredTensor {
  int64_t size;
  c10::ScalarType dtype, stored;
  std::vector<StoredRows> parts;
};

// A matrix of a layer's experts, or some of its rows, in blocks of a GGUF file. Row n becomes row
// first + n * step of the tensors with these numbers, -1 for none.
struct StoredBlocks {
  const BlockType* type;
  int64_t file, offset, stride, rows, in_row;  // bytes to the next expert; blocks
  int64_t codes, scales, zeros, first, step;
};

// Memory of a tensor on the host, with rows behind each other.
class HostRows {
 public:
  // `view` is the memory of the tensor on the host.
  HostRows(const at::Tensor& tensor, const at::Tensor& view);
  char* row(int64_t number) const { return first_ + number * size_; }
  // Tells torch that the tensor was written: what was computed from its content is not used any more.
  void bump_version() const {
    if (version_.enabled()) version_.bump();
  }

 private:
  std::shared_ptr<const c10::DataPtr> kept_;
  mutable c10::VariableVersion version_;
  char* first_;
  int64_t size_;
};

struct StoredLayer {
  std::string name;
  int64_t experts;
  std::vector<StoredTensor> tensors;  // without parts where blocks become them
  std::vector<StoredBlocks> blocks;
  std::vector<uint32_t> checksums;  // of each expert; none where the files have none
  std::unique_ptr<std::atomic<bool>[]> is_checked;
};

// An expert that is read into memory: the memory of each of its tensors.
struct ExpertRead {
  int64_t layer, expert;
  std::vector<char*> to;
  std::function<void(const ReadFault&)> done;  // by the thread that ends the last read
  std::atomic<int64_t> left = 0;               // reads
  std::mutex mutex;
  ReadFault fault;  // the first one
};

// What a model has asked of its disk.
struct DiskCounters {
  std::atomic<int64_t> hits = 0, misses = 0, layers = 0, bytes_read = 0, nanoseconds = 0;
};

class Disk : public std::enable_shared_from_this<Disk> {
 public:
  // `files` are open, and stay so. Reads are of `piece` bytes at most, `depth` of them at once.
  Disk(std::string path, std::vector<std::string> names, const std::vector<int64_t>& files, int64_t depth,
       int64_t piece);
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  void add_layer(StoredLayer layer) { layers_.push_back(std::move(layer)); }
  const StoredLayer& layer(int64_t number) const { return layers_.at(static_cast<size_t>(number)); }
  const std::string& path() const { return path_; }

  // Raises RuntimeError in a fork, which has no threads, and whose locks may be another thread's.
  void require_own_process() const;
  // Begins to read experts; they are told where no thread can be made.
  void read(const std::vector<std::shared_ptr<ExpertRead>>& reads);
  // Runs a call by one thread, in order, which may wait for reads. Returns: why no thread can be made.
  ReadFault run_in_turn(std::function<void()> call);
  // Threads end once nothing is left to do.
  void close();
  // Reads that were asked for, and those that have ended.
  int64_t begun() const { return begun_; }
  int64_t ended() const { return ended_; }

  DiskCounters counters;

 private:
  struct Extent {
    int64_t file, offset;
    char* to;
    int64_t size;
    const StoredBlocks* blocks = nullptr;  // which are converted; none for bytes that are read in place
    int64_t first = 0;                     // number of the first block
  };
  using Extents = std::vector<Extent>;
  struct Calls {
    std::deque<std::function<void()>> waiting;
    std::condition_variable changed;
    int64_t threads = 0, most;
  };

  ReadFault submit(Calls& calls, std::function<void()> call);
  void run(Calls& calls);
  Extents extents(const ExpertRead& read) const;
  ReadFault fill(const ExpertRead& read, const Extents& extents) const;
  ReadFault fill_blocks(const ExpertRead& read, const Extent& extent) const;
  ReadFault fill_memory(const ExpertRead& read, int64_t file, int64_t offset, int64_t needed,
                        std::vector<iovec> rest) const;
  void finish_piece(ExpertRead& read, const ReadFault& fault);
  ReadFault checked(const ExpertRead& read);
  std::string of(const ExpertRead& read, int64_t file) const;

  std::string path_;
  std::vector<std::string> names_;
  std::vector<OpenFile> files_;
  std::deque<StoredLayer> layers_;
  int64_t depth_, piece_;
  std::mutex mutex_;
  Calls reads_, turns_;
  bool is_closed_ = false;
  std::atomic<int64_t> begun_ = 0, ended_ = 0;
  int process_;
};

}  // namespace moe_mps
