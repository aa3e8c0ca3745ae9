// The slots of one layer: the experts that were needed last, of all sequences together.
//
// A pool is asked with ids, and calls back with their slots: at once if all experts are in memory, else by
// the thread that has read the last missing one. Experts of requests that have not been answered keep their
// slots. One that is being read for a request serves the others, too. A request waits where no slot is free.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "disk.h"

namespace moe_mps {

class Pool;

// A request for slots.
class SlotRequest {
 public:
  using Done = std::function<void(const ReadFault&, const std::vector<int32_t>&)>;

 private:
  friend class Pool;
  std::vector<int64_t> ids, needed;  // all; distinct experts
  Done done;
  // Under the pool's mutex:
  size_t left = 0;            // experts that are being read for it
  std::vector<int64_t> held;  // experts that keep their slots
  bool is_over = false;
  ReadFault fault;
  std::chrono::steady_clock::time_point began;
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // `slots` are the memory of the weights [slots, ...].
  Pool(std::shared_ptr<Disk> disk, int64_t layer, std::vector<HostRows> slots, int64_t count);

  // Asks for slots of ids, which lie in int32; an id of no expert stays as it is. `done` may be called at
  // once, and is called by any thread.
  std::shared_ptr<SlotRequest> ask(std::vector<int64_t> ids, SlotRequest::Done done);
  // From here on nothing is called for a request, and it keeps no slot; what was begun is read.
  void abandon(const std::shared_ptr<SlotRequest>& request);

  // Copies those of some experts that are in slots to memory [experts, ...] of each tensor. `read_others` is
  // called with the others before that, so that the disk works meanwhile.
  void copy(const std::vector<int64_t>& experts, const std::vector<HostRows>& to,
            const std::function<void(const std::vector<int64_t>&)>& read_others);

  Disk& disk() const { return *disk_; }
  int64_t layer() const { return layer_; }
  const std::string& name() const { return disk_->layer(layer_).name; }
  int64_t experts() const { return disk_->layer(layer_).experts; }

 private:
  struct Entry {
    int32_t slot;
    int64_t holders = 0;
    std::list<int64_t>::iterator place;  // in order_
  };
  struct Loading {
    int32_t slot;
    std::vector<std::shared_ptr<SlotRequest>> waiting;
  };
  // What follows from a change, done without the mutex.
  struct DeferredWork {
    std::vector<std::shared_ptr<ExpertRead>> reads;
    std::vector<std::function<void()>> calls;
  };

  bool assign(const std::shared_ptr<SlotRequest>& request, DeferredWork& deferred);
  void finish(const std::shared_ptr<SlotRequest>& request, DeferredWork& deferred);
  void hold(Entry& entry);
  void release(SlotRequest& request);
  void assign_waiting(DeferredWork& deferred);
  void loaded(int64_t expert, const ReadFault& fault);
  void act(DeferredWork& deferred);

  std::shared_ptr<Disk> disk_;
  int64_t layer_;
  std::vector<HostRows> slots_;
  size_t size_, held_ = 0;  // entries with holders
  std::mutex mutex_;
  std::unordered_map<int64_t, Entry> entries_;
  std::unordered_map<int64_t, Loading> loading_;
  std::list<int64_t> order_;  // experts, least recently used first
  std::vector<int32_t> free_;
  std::vector<std::shared_ptr<SlotRequest>> waiting_;  // for free slots
};

}  // namespace moe_mps
