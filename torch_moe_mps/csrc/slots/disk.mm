#include "disk.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace moe_mps {
namespace {

// CRC-32 as zlib has it, eight bytes at a time.
struct Crc {
  std::array<std::array<uint32_t, 256>, 8> table;

  Crc() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
      table[0][i] = value;
    }
    for (size_t k = 1; k < table.size(); ++k)
      for (size_t i = 0; i < 256; ++i) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 0xFF];
  }

  uint32_t operator()(uint32_t before, const char* bytes, int64_t size) const {
    uint32_t crc = ~before;
    for (; size >= 8; bytes += 8, size -= 8) {
      uint64_t word;
      std::memcpy(&word, bytes, 8);
      word ^= crc;
      crc = 0;
      for (size_t k = 0; k < 8; ++k) crc ^= table[7 - k][word >> 8 * k & 0xFF];
    }
    for (; size > 0; ++bytes, --size) crc = crc >> 8 ^ table[0][(crc ^ static_cast<uint8_t>(*bytes)) & 0xFF];
    return ~crc;
  }
};

constexpr int64_t kPage = 1 << 14;  // bytes: a page of Apple silicon

// Memory that begins with a page, and grows.
class PageMemory {
 public:
  PageMemory() = default;
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;
  ~PageMemory() { std::free(first_); }

  // So many bytes; null where there are not so many.
  char* of(int64_t size) {
    if (size <= size_) return static_cast<char*>(first_);
    std::free(std::exchange(first_, nullptr));
    size_ = 0;
    if (posix_memalign(&first_, kPage, static_cast<size_t>(size)) != 0) return nullptr;
    size_ = size;
    return static_cast<char*>(first_);
  }

 private:
  void* first_ = nullptr;
  int64_t size_ = 0;
};

using SharedMemory = std::shared_ptr<const c10::DataPtr>;

void drop(void* memory) {
  delete static_cast<SharedMemory*>(memory);
}

// The memory of a tensor, which outlives the tensor as long as somebody has it.
SharedMemory shared_memory(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const c10::DataPtr& now = storage->data_ptr();
  if (now.get_deleter() != &drop) {
    void* data = storage->mutable_data();
    const c10::Device device = now.device();
    auto memory = std::make_shared<const c10::DataPtr>(storage->set_data_ptr(c10::DataPtr()));
    storage->set_data_ptr(c10::DataPtr(data, new SharedMemory(std::move(memory)), &drop, device));
  }
  return *static_cast<SharedMemory*>(storage->data_ptr().get_context());
}

}  // namespace

OpenFile::OpenFile(int file) : number_(fcntl(file, F_DUPFD_CLOEXEC, 0)) {}

OpenFile::~OpenFile() {
  if (number_ >= 0) ::close(number_);
}

HostRows::HostRows(const at::Tensor& tensor, const at::Tensor& view)
    : kept_(shared_memory(tensor)),
      version_(tensor.is_inference() ? c10::VariableVersion(c10::VariableVersion::DISABLED)
                                     : tensor.unsafeGetTensorImpl()->version_counter()),
      first_(static_cast<char*>(view.data_ptr())),
      size_(static_cast<int64_t>(view.nbytes()) / std::max<int64_t>(1, view.size(0))) {}

Disk::Disk(std::string path, std::vector<std::string> names, const std::vector<int64_t>& files, int64_t depth,
           int64_t piece)
    : path_(std::move(path)), names_(std::move(names)), depth_(depth), piece_(piece), process_(getpid()) {
  for (const int64_t file : files) {
    OpenFile own(static_cast<int>(file));  // a late read outlives the caller's
    TORCH_CHECK(own.number() >= 0, "moe_mps: ", path_,
                " cannot be read: ", std::generic_category().message(errno));
    files_.push_back(std::move(own));
  }
  reads_.most = depth;
  turns_.most = 1;
}

void Disk::close() {
  if (getpid() != process_) return;  // its threads are the other process's
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  reads_.changed.notify_all();
  turns_.changed.notify_all();
}

void Disk::require_own_process() const {
  TORCH_CHECK(getpid() == process_, path_, ": a fork cannot read experts on the disk: load the model in it");
}

// Returns: why no thread will run the call, which is dropped then.
ReadFault Disk::submit(Calls& calls, std::function<void()> call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (calls.threads < calls.most) {
    try {
      std::thread([self = shared_from_this(), &calls] { self->run(calls); }).detach();
      ++calls.threads;
    } catch (const std::system_error& error) {
      if (calls.threads == 0)  // else the others run it
        return {c10::str(path_, " cannot be read, as no thread can be made: ", error.code().message()),
                error.code().value()};
    }
  }
  calls.waiting.push_back(std::move(call));
  calls.changed.notify_one();
  return {};
}

void Disk::run(Calls& calls) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    calls.changed.wait(lock, [&] { return is_closed_ || !calls.waiting.empty(); });
    if (calls.waiting.empty()) {
      --calls.threads;  // what is asked for later has a new one
      return;
    }
    std::function<void()> call = std::move(calls.waiting.front());
    calls.waiting.pop_front();
    lock.unlock();
    call();
    call = nullptr;  // what it keeps is freed before the next one comes
    lock.lock();
  }
}

ReadFault Disk::run_in_turn(std::function<void()> call) {
  return submit(turns_, std::move(call));
}

std::string Disk::of(const ExpertRead& read, int64_t file) const {
  return c10::str(names_[static_cast<size_t>(file)], ": expert ", read.expert, " of ",
                  layer(read.layer).name);
}

Disk::Extents Disk::extents(const ExpertRead& read) const {
  Extents result;
  const std::vector<StoredTensor>& tensors = layer(read.layer).tensors;
  for (size_t number = 0; number < tensors.size(); ++number) {
    int64_t row = read.expert;
    for (const StoredRows& part : tensors[number].parts) {
      if (row < part.rows) {
        result.push_back({part.file, part.offset + row * part.stride, read.to[number], tensors[number].size});
        break;
      }
      row -= part.rows;
    }
  }
  for (const StoredBlocks& blocks : layer(read.layer).blocks)
    result.push_back({blocks.file, blocks.offset + read.expert * blocks.stride, nullptr,
                      blocks.rows * blocks.in_row * blocks.type->bytes, &blocks});
  return result;
}

ReadFault Disk::fill(const ExpertRead& read, const Extents& extents) const {
  for (size_t first = 0; first < extents.size();) {
    ReadFault fault;
    if (extents[first].blocks != nullptr) {
      fault = fill_blocks(read, extents[first++]);
    } else {
      const int64_t file = extents[first].file, offset = extents[first].offset;
      int64_t end = offset;
      std::vector<iovec> rest;
      for (; first < extents.size() && extents[first].blocks == nullptr && extents[first].file == file &&
             extents[first].offset == end;
           ++first) {
        rest.push_back({extents[first].to, static_cast<size_t>(extents[first].size)});
        end += extents[first].size;
      }
      fault = fill_memory(read, file, offset, end - offset, std::move(rest));
    }
    if (!fault.why.empty()) return fault;
  }
  return {};
}

// Reads whole pages, as a read past the page cache needs them, into memory of this thread, and converts the
// blocks in it.
ReadFault Disk::fill_blocks(const ExpertRead& read, const Extent& extent) const {
  static thread_local PageMemory memory;
  const int64_t before = extent.offset % kPage, needed = before + extent.size;
  char* from = memory.of((needed + kPage - 1) / kPage * kPage);
  if (from == nullptr)
    return {of(read, extent.file) + ": " + std::generic_category().message(ENOMEM), ENOMEM};
  const ReadFault fault = fill_memory(read, extent.file, extent.offset - before, needed,
                                      {{from, static_cast<size_t>((needed + kPage - 1) / kPage * kPage)}});
  if (!fault.why.empty()) return fault;
  const StoredBlocks& blocks = *extent.blocks;
  const BlockType& type = *blocks.type;
  const auto to = [&read](int64_t tensor, int64_t offset) {
    return tensor < 0 ? nullptr : read.to[static_cast<size_t>(tensor)] + offset;
  };
  from += before;
  for (int64_t number = extent.first, left = extent.size / type.bytes; left > 0;) {
    const int64_t row = number / blocks.in_row, column = number % blocks.in_row;
    const int64_t count = blocks.step == 1 ? left : std::min(left, blocks.in_row - column);
    const int64_t block = (blocks.first + row * blocks.step) * blocks.in_row + column;
    type.convert(from, count, to(blocks.codes, block * type.codes), to(blocks.scales, block * type.scales),
                 to(blocks.zeros, block * type.zeros));
    from += count * type.bytes;
    number += count;
    left -= count;
  }
  return {};
}

// Reads into memory, which may be larger than what is needed where the file ends before.
ReadFault Disk::fill_memory(const ExpertRead& read, int64_t file, int64_t offset, int64_t needed,
                            std::vector<iovec> rest) const {
  const int64_t end = offset + needed;
  for (size_t begun = 0; offset < end;) {
    ssize_t count = preadv(files_[static_cast<size_t>(file)].number(), rest.data() + begun,
                           static_cast<int>(rest.size() - begun), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int error = errno;
      return {c10::str(of(read, file), ": ", std::generic_category().message(error)), error};
    }
    if (count == 0) return {of(read, file) + " is truncated"};
    offset += count;
    while (begun < rest.size() && static_cast<size_t>(count) >= rest[begun].iov_len)
      count -= static_cast<ssize_t>(rest[begun++].iov_len);
    if (count > 0) {
      rest[begun].iov_base = static_cast<char*>(rest[begun].iov_base) + count;
      rest[begun].iov_len -= static_cast<size_t>(count);
    }
  }
  return {};
}

ReadFault Disk::checked(const ExpertRead& read) {
  StoredLayer& about = layers_.at(static_cast<size_t>(read.layer));
  const auto expert = static_cast<size_t>(read.expert);
  if (!about.checksums.empty() && !about.is_checked[expert]) {
    static const Crc crc;
    uint32_t sum = 0;
    for (size_t n = 0; n < read.to.size(); ++n) sum = crc(sum, read.to[n], about.tensors[n].size);
    if (sum != about.checksums[expert])
      return {of(read, 0) + " has another checksum than it was written with"};
    about.is_checked[expert] = true;
  }
  for (size_t n = 0; n < read.to.size(); ++n) {
    const StoredTensor& tensor = about.tensors[n];
    if (tensor.stored == tensor.dtype) continue;
    const int64_t count = tensor.size / static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const at::Tensor given = at::from_blob(read.to[n], {count}, tensor.dtype);
    given.copy_(at::from_blob(read.to[n], {count}, tensor.stored).clone());
  }
  return {};
}

void Disk::finish_piece(ExpertRead& read, const ReadFault& fault) {
  if (!fault.why.empty()) {
    const std::lock_guard<std::mutex> lock(read.mutex);
    if (read.fault.why.empty()) read.fault = fault;
  }
  if (--read.left > 0) return;
  if (read.fault.why.empty()) read.fault = checked(read);
  if (read.fault.why.empty())
    for (const StoredTensor& tensor : layer(read.layer).tensors) counters.bytes_read += tensor.size;
  read.done(read.fault);
}

void Disk::read(const std::vector<std::shared_ptr<ExpertRead>>& reads) {
  if (reads.empty()) return;
  int64_t size = 0;
  for (const StoredTensor& tensor : layer(reads[0]->layer).tensors) size += tensor.size;
  const auto count = static_cast<int64_t>(reads.size());
  // One call reads several small experts.
  const int64_t together =
      std::max<int64_t>(1, std::min(piece_ / std::max<int64_t>(1, size), (count + depth_ - 1) / depth_));
  using Piece = std::pair<std::shared_ptr<ExpertRead>, Extents>;
  std::vector<std::vector<Piece>> calls;
  for (const std::shared_ptr<ExpertRead>& read : reads) {
    std::vector<Extents> pieces(1);
    int64_t room = piece_;
    for (Extent rest : extents(*read)) {
      const int64_t unit = rest.blocks == nullptr ? 1 : rest.blocks->type->bytes;
      while (rest.size > 0) {
        int64_t taken = std::min(rest.size, room) / unit * unit;
        if (taken == 0 && pieces.back().empty()) taken = unit;  // a block that is larger than a piece
        if (taken > 0) {
          pieces.back().push_back({rest.file, rest.offset, rest.to, taken, rest.blocks, rest.first});
          rest.offset += taken;
          if (rest.to != nullptr) rest.to += taken;
          rest.first += taken / unit;
          rest.size -= taken;
          room -= taken;
        }
        if (room < unit) {
          pieces.emplace_back();
          room = piece_;
        }
      }
    }
    if (pieces.size() > 1 && pieces.back().empty()) pieces.pop_back();
    read->left = static_cast<int64_t>(pieces.size());
    for (Extents& piece : pieces) {
      const bool joins =
          together > 1 && !calls.empty() && calls.back().size() < static_cast<size_t>(together);
      if (!joins) calls.emplace_back();
      calls.back().emplace_back(read, std::move(piece));
    }
  }
  for (const std::vector<Piece>& pieces : calls) {
    begun_ += static_cast<int64_t>(pieces.size());
    const auto finish = [this](const Piece& piece, const ReadFault& fault) {
      ++ended_;
      finish_piece(*piece.first, fault);
    };
    const ReadFault fault = submit(reads_, [this, finish, pieces] {
      for (const Piece& piece : pieces) finish(piece, fill(*piece.first, piece.second));
    });
    if (fault.why.empty()) continue;
    for (const Piece& piece : pieces) finish(piece, fault);
  }
}

}  // namespace moe_mps
