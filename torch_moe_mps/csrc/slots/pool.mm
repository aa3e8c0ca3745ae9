#include "pool.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_set>
#include <utility>

namespace moe_mps {

Pool::Pool(std::shared_ptr<Disk> disk, int64_t layer, std::vector<HostRows> slots, int64_t count)
    : disk_(std::move(disk)), layer_(layer), slots_(std::move(slots)), size_(static_cast<size_t>(count)) {
  for (size_t slot = size_; slot > 0; --slot) free_.push_back(static_cast<int32_t>(slot - 1));
}

std::shared_ptr<Asked> Pool::ask(std::vector<int64_t> ids, Asked::Done done) {
  auto asked = std::make_shared<Asked>();
  std::unordered_set<int64_t> distinct;
  for (const int64_t id : ids)
    if (id >= 0 && id < experts() && distinct.insert(id).second) asked->needed.push_back(id);
  disk_->require_own_process();
  asked->ids = std::move(ids);
  asked->done = std::move(done);
  asked->began = std::chrono::steady_clock::now();
  if (asked->needed.size() > size_) {
    asked->is_over = true;
    asked->done({c10::str("moe_mps::_expert_slots: ids must name at most ", size_, " experts, the slots of ",
                          name(), ", got ", asked->needed.size())},
                {});
    return asked;
  }
  Later later;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!begin(asked, later)) waiting_.push_back(asked);
  }
  act(later);
  return asked;
}

// Gives a request its slots, and notes what must be read. Returns: false where too few slots are free. Under
// the mutex.
bool Pool::begin(const std::shared_ptr<Asked>& asked, Later& later) {
  const std::vector<int64_t>& needed = asked->needed;
  size_t missing = 0, unheld = 0;
  for (const int64_t expert : needed) {
    const auto entry = entries_.find(expert);
    if (entry != entries_.end()) {
      unheld += entry->second.holders == 0;
    } else {
      missing += loading_.count(expert) == 0;
    }
  }
  if (missing > free_.size() + entries_.size() - held_ - unheld) return false;
  for (const int64_t expert : needed) {
    const auto entry = entries_.find(expert);
    if (entry == entries_.end()) continue;
    hold(entry->second);
    order_.splice(order_.end(), order_, entry->second.place);
    asked->held.push_back(expert);
  }
  const auto hits = static_cast<int64_t>(asked->held.size());
  disk_->counters.hits += hits;
  disk_->counters.misses += static_cast<int64_t>(needed.size()) - hits;
  asked->left = needed.size() - asked->held.size();
  for (const int64_t expert : needed) {
    if (entries_.count(expert) != 0) continue;
    const auto loading = loading_.find(expert);
    if (loading != loading_.end()) {
      loading->second.waiting.push_back(asked);
      continue;
    }
    if (free_.empty()) {
      const auto oldest = std::find_if(order_.begin(), order_.end(),
                                       [this](int64_t each) { return entries_.at(each).holders == 0; });
      free_.push_back(entries_.at(*oldest).slot);
      entries_.erase(*oldest);
      order_.erase(oldest);
    }
    const int32_t slot = free_.back();
    free_.pop_back();
    loading_.emplace(expert, Loading{slot, {asked}});
    auto read = std::make_shared<ExpertRead>();
    read->layer = layer_;
    read->expert = expert;
    for (const HostRows& rows : slots_) read->to.push_back(rows.row(slot));
    read->done = [self = shared_from_this(), expert](const ReadFault& fault) { self->loaded(expert, fault); };
    later.reads.push_back(std::move(read));
  }
  if (asked->left == 0) finish(asked, later);
  return true;
}

// Answers a request whose experts are there, or have failed. Under the mutex.
void Pool::finish(const std::shared_ptr<Asked>& asked, Later& later) {
  std::vector<int32_t> slots;
  for (const int64_t id : asked->ids) {
    const auto entry = entries_.find(id);
    slots.push_back(entry == entries_.end() ? static_cast<int32_t>(id) : entry->second.slot);
  }
  if (asked->held.size() < asked->needed.size() || !asked->fault.why.empty()) slots.clear();
  release(*asked);
  if (!std::exchange(asked->is_over, true)) {
    later.calls.push_back(
        [asked, slots = std::move(slots)] { std::exchange(asked->done, nullptr)(asked->fault, slots); });
  }
}

// Under the mutex.
void Pool::hold(Entry& entry) {
  held_ += entry.holders++ == 0;
}

// Under the mutex.
void Pool::release(Asked& asked) {
  for (const int64_t expert : asked.held) held_ -= --entries_.at(expert).holders == 0;
  asked.held.clear();
}

// Begins requests for which there are slots now. Under the mutex.
void Pool::begin_waiting(Later& later) {
  std::vector<std::shared_ptr<Asked>> still;
  for (const std::shared_ptr<Asked>& asked : waiting_)
    if (!begin(asked, later)) still.push_back(asked);
  waiting_ = std::move(still);
}

void Pool::loaded(int64_t expert, const ReadFault& fault) {
  Later later;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = loading_.find(expert);
    const Loading loading = std::move(found->second);
    loading_.erase(found);
    for (const HostRows& rows : slots_) rows.note_written();
    if (fault.why.empty()) {
      order_.push_back(expert);
      entries_.emplace(expert, Entry{loading.slot, 0, std::prev(order_.end())});
    } else {
      free_.push_back(loading.slot);
    }
    for (const std::shared_ptr<Asked>& asked : loading.waiting) {
      if (asked->is_over) continue;
      if (!fault.why.empty()) {
        if (asked->fault.why.empty()) asked->fault = fault;
      } else {
        hold(entries_.at(expert));
        asked->held.push_back(expert);
      }
      if (--asked->left > 0) continue;
      disk_->counters.nanoseconds += (std::chrono::steady_clock::now() - asked->began).count();
      finish(asked, later);
    }
    begin_waiting(later);
  }
  act(later);
}

void Pool::abandon(const std::shared_ptr<Asked>& asked) {
  Later later;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(asked->is_over, true)) return;
    release(*asked);
    asked->done = nullptr;
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), asked), waiting_.end());
    begin_waiting(later);
  }
  act(later);
}

void Pool::act(Later& later) {
  disk_->read(later.reads);
  for (const std::function<void()>& call : later.calls) call();
}

void Pool::copy(const std::vector<int64_t>& experts, const std::vector<HostRows>& to,
                const std::function<void(const std::vector<int64_t>&)>& read_others) {
  Asked holder;
  std::vector<int32_t> slots;
  std::vector<int64_t> others;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const int64_t expert : experts) {
      const auto entry = entries_.find(expert);
      if (entry == entries_.end()) {
        others.push_back(expert);
        continue;
      }
      hold(entry->second);
      holder.held.push_back(expert);
      slots.push_back(entry->second.slot);
    }
  }
  read_others(others);
  for (size_t n = 0; n < slots.size(); ++n)
    for (size_t tensor = 0; tensor < to.size(); ++tensor)
      std::memcpy(to[tensor].row(holder.held[n]), slots_[tensor].row(slots[n]),
                  static_cast<size_t>(disk_->layer(layer_).tensors[tensor].size));
  Later later;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    release(holder);
    begin_waiting(later);
  }
  act(later);
}

}  // namespace moe_mps
