// torch.classes.moe_mps.ExpertDisk, SlotPool and SlotReading, which torch_moe_mps/disk/pool.py uses.
#include <torch/custom_class.h>

#include <optional>
#include <tuple>
#include <utility>

#include "../metal/faults.h"
#include "numbers.h"

namespace moe_mps {
namespace {

// What a caller waits for. Whoever drops it gives it up.
class SlotReading : public torch::CustomClassHolder {
 public:
  struct Result {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_there = false;
    ReadFault fault;
    std::exception_ptr error;
    std::vector<int32_t> slots;

    void set(const ReadFault& why, std::vector<int32_t> found, std::exception_ptr raised) {
      const std::lock_guard<std::mutex> lock(mutex);
      fault = why;
      slots = std::move(found);
      error = std::move(raised);
      is_there = true;
      changed.notify_all();
    }
  };

  explicit SlotReading(std::shared_ptr<Result> result) : result_(std::move(result)) {}
  ~SlotReading() override {
    if (give_up) give_up();
  }

  // Whether it is there after at most so many seconds.
  bool wait(double seconds) {
    std::unique_lock<std::mutex> lock(result_->mutex);
    return result_->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                     [this] { return result_->is_there; });
  }

  // Why it failed, with the system's number of the error; and the slots. Raises a fault of the GPU.
  std::tuple<std::string, int64_t, std::vector<int64_t>> result() {
    const std::lock_guard<std::mutex> lock(result_->mutex);
    TORCH_CHECK(result_->is_there, "moe_mps: experts are still being read");
    if (result_->error) std::rethrow_exception(result_->error);
    return {result_->fault.why, result_->fault.error, {result_->slots.begin(), result_->slots.end()}};
  }

  std::function<void()> give_up;

 private:
  std::shared_ptr<Result> result_;
};

// Reads into the memory of whole layers that have not ended: it must not be written by others.
struct Staged {
  std::mutex mutex;
  std::condition_variable changed;
  size_t left = 0;

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return left == 0; });
  }
};

class ExpertDisk : public torch::CustomClassHolder {
 public:
  ExpertDisk(std::string path, std::vector<std::string> names, std::vector<int64_t> files, int64_t depth,
             int64_t piece)
      : disk(std::make_shared<Disk>(std::move(path), std::move(names), files, depth, piece)) {}
  ~ExpertDisk() override { disk->close(); }

  // `like` are tensors of an expert, `stored` have the dtypes in the files; rows of `places` are the number
  // of a tensor, and its `StoredRows`. Rows of `blocks` are a `StoredBlocks` whose type is in `types`.
  void add_layer(std::string name, int64_t experts, const std::vector<at::Tensor>& like,
                 const std::vector<at::Tensor>& stored, const at::Tensor& places, const at::Tensor& checksums,
                 const std::vector<std::string>& types, const at::Tensor& blocks) {
    StoredLayer layer{std::move(name), experts, {}, {}, {}, nullptr};
    for (size_t n = 0; n < like.size(); ++n)
      layer.tensors.push_back({static_cast<int64_t>(like[n].nbytes()),
                               like[n].scalar_type(),
                               like[n].is_floating_point() ? stored[n].scalar_type() : like[n].scalar_type(),
                               {}});
    const auto* place = places.const_data_ptr<int64_t>();
    for (int64_t row = 0; row < places.size(0); ++row, place += 5)
      layer.tensors.at(static_cast<size_t>(place[0]))
          .parts.push_back({place[1], place[2], place[3], place[4]});
    const auto* row = blocks.const_data_ptr<int64_t>();
    for (const std::string& type : types) {
      const BlockType* found = block_type(type, like.at(static_cast<size_t>(row[5])).scalar_type());
      TORCH_CHECK(found != nullptr, "moe_mps: ", layer.name, " must be of known blocks, got ", type);
      layer.blocks.push_back(
          {found, row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9]});
      row += 10;
    }
    const auto* sums = checksums.const_data_ptr<int64_t>();
    for (int64_t n = 0; n < checksums.numel(); ++n) layer.checksums.push_back(static_cast<uint32_t>(sums[n]));
    layer.is_checked = std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(experts));
    disk->add_layer(std::move(layer));
  }

  // Hits, misses, layers, bytes, and the seconds that were waited for.
  std::tuple<int64_t, int64_t, int64_t, int64_t, double> counters() const {
    const DiskCounters& all = disk->counters;
    return {all.hits, all.misses, all.layers, all.bytes_read, 1e-9 * static_cast<double>(all.nanoseconds)};
  }

  const std::shared_ptr<Disk> disk;
  const std::shared_ptr<Staged> staged = std::make_shared<Staged>();
};

class SlotPool : public torch::CustomClassHolder {
 public:
  // `tensors` [slots, ...] are the weights, `views` their memory on the host.
  SlotPool(const c10::intrusive_ptr<ExpertDisk>& disk, int64_t number, int64_t layer,
           const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& views, double limit)
      : disk_(disk),
        pool_(std::make_shared<Pool>(disk->disk, layer, rows_of(tensors, views), views.at(0).size(0))) {
    add_number(number, pool_, limit);
  }

  c10::intrusive_ptr<SlotReading> ask(const at::Tensor& ids) {
    const auto result = std::make_shared<SlotReading::Result>();
    const auto* first = ids.const_data_ptr<int32_t>();
    const std::shared_ptr<SlotRequest> request = pool_->ask(
        {first, first + ids.numel()}, [result](const ReadFault& fault, const std::vector<int32_t>& slots) {
          result->set(fault, slots, nullptr);
        });
    auto reading = c10::make_intrusive<SlotReading>(result);
    reading->give_up = [pool = pool_, request] { pool->abandon(request); };
    return reading;
  }

  // Experts, in tensors [experts, ...] for a whole layer and their memory on the host: copies of those in
  // slots, and what is read behind a mark of the GPU's (0 for none). It goes on where it is given up.
  c10::intrusive_ptr<SlotReading> stage(const std::vector<at::Tensor>& tensors,
                                        const std::vector<at::Tensor>& views, std::vector<int64_t> experts,
                                        int64_t stream, int64_t buffer) {
    disk_->disk->require_own_process();
    const auto result = std::make_shared<SlotReading::Result>();
    const auto run = [pool = pool_, staged = disk_->staged, result, to = rows_of(tensors, views),
                      experts = std::move(experts), stream, buffer] {
      try {
        if (stream != 0) wait_for_buffer(stream, buffer);
        staged->wait();
        const ReadFault fault = fill(*pool, staged, to, experts);
        to.at(0).bump_version();  // views of one memory
        result->set(fault, {}, nullptr);
      } catch (...) {
        result->set({}, {}, std::current_exception());
      }
    };
    if (const ReadFault fault = disk_->disk->run_in_turn(run); !fault.why.empty())
      result->set(fault, {}, nullptr);
    return c10::make_intrusive<SlotReading>(result);
  }

  void note_layer(double seconds) {
    DiskCounters& counters = disk_->disk->counters;
    ++counters.layers;
    counters.nanoseconds += static_cast<int64_t>(1e9 * seconds);
  }

  // Reads of the disk that have ended, and those that were requested.
  std::tuple<int64_t, int64_t> reads() const {
    const int64_t ended = disk_->disk->ended();
    return {ended, disk_->disk->begun()};
  }

 private:
  static std::vector<HostRows> rows_of(const std::vector<at::Tensor>& tensors,
                                       const std::vector<at::Tensor>& views) {
    std::vector<HostRows> rows;
    for (size_t n = 0; n < tensors.size(); ++n) rows.emplace_back(tensors[n], views.at(n));
    return rows;
  }

  static ReadFault fill(Pool& pool, const std::shared_ptr<Staged>& staged, const std::vector<HostRows>& to,
                        const std::vector<int64_t>& experts) {
    std::vector<std::shared_ptr<ExpertRead>> reads;
    pool.copy(experts, to, [&](const std::vector<int64_t>& others) {
      for (const int64_t expert : others) {
        auto read = std::make_shared<ExpertRead>();
        read->layer = pool.layer();
        read->expert = expert;
        for (const HostRows& rows : to) read->to.push_back(rows.row(expert));
        read->done = [staged, to](const ReadFault&) {  // the memory is kept until then
          const std::lock_guard<std::mutex> lock(staged->mutex);
          if (--staged->left == 0) staged->changed.notify_all();
        };
        reads.push_back(std::move(read));
      }
      {
        const std::lock_guard<std::mutex> lock(staged->mutex);
        staged->left += reads.size();
      }
      pool.disk().read(reads);
    });
    staged->wait();
    for (const std::shared_ptr<ExpertRead>& read : reads)
      if (!read->fault.why.empty()) return read->fault;
    return {};
  }

  c10::intrusive_ptr<ExpertDisk> disk_;
  std::shared_ptr<Pool> pool_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_mps, m) {
  m.class_<SlotReading>("SlotReading").def("wait", &SlotReading::wait).def("result", &SlotReading::result);
  m.class_<ExpertDisk>("ExpertDisk")
      .def(torch::init<std::string, std::vector<std::string>, std::vector<int64_t>, int64_t, int64_t>())
      .def("add_layer", &ExpertDisk::add_layer)
      .def("counters", &ExpertDisk::counters);
  m.class_<SlotPool>("SlotPool")
      .def(torch::init<c10::intrusive_ptr<ExpertDisk>, int64_t, int64_t, std::vector<at::Tensor>,
                       std::vector<at::Tensor>, double>())
      .def("ask", &SlotPool::ask)
      .def("stage", &SlotPool::stage)
      .def("note_layer", &SlotPool::note_layer)
      .def("reads", &SlotPool::reads);
}

}  // namespace moe_mps
