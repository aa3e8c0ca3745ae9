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

std::shared_ptr<SlotRequest> Pool::ask(std::vector<int64_t> ids, SlotRequest::Done done) {
  auto request = std::make_shared<SlotRequest>();
  std::unordered_set<int64_t> distinct;
  for (const int64_t id : ids)
    if (id >= 0 && id < experts() && distinct.insert(id).second) request->needed.push_back(id);
  disk_->require_own_process();
  request->ids = std::move(ids);
  request->done = std::move(done);
  request->began = std::chrono::steady_clock::now();
  if (request->needed.size() > size_) {
    request->is_over = true;
    request->done({c10::str("moe_mps::_expert_slots: ids must name at most ", size_,
                            " experts, the slots of ", name(), ", got ", request->needed.size())},
                  {});
    return request;
  }
  DeferredWork deferred;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!assign(request, deferred)) waiting_.push_back(request);
  }
  act(deferred);
  return request;
}

// Gives a request its slots, and notes what must be read. Returns: false where too few slots are free. Under
// the mutex.
bool Pool::assign(const std::shared_ptr<SlotRequest>& request, DeferredWork& deferred) {
  const std::vector<int64_t>& needed = request->needed;
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
    request->held.push_back(expert);
  }
  const auto hits = static_cast<int64_t>(request->held.size());
  disk_->counters.hits += hits;
  disk_->counters.misses += static_cast<int64_t>(needed.size()) - hits;
  request->left = needed.size() - request->held.size();
  for (const int64_t expert : needed) {
    if (entries_.count(expert) != 0) continue;
    const auto loading = loading_.find(expert);
    if (loading != loading_.end()) {
      loading->second.waiting.push_back(request);
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
    loading_.emplace(expert, Loading{slot, {request}});
    auto read = std::make_shared<ExpertRead>();
    read->layer = layer_;
    read->expert = expert;
    for (const HostRows& rows : slots_) read->to.push_back(rows.row(slot));
    read->done = [self = shared_from_this(), expert](const ReadFault& fault) { self->loaded(expert, fault); };
    deferred.reads.push_back(std::move(read));
  }
  if (request->left == 0) finish(request, deferred);
  return true;
}

// Answers a request whose experts are there, or have failed. Under the mutex.
void Pool::finish(const std::shared_ptr<SlotRequest>& request, DeferredWork& deferred) {
  std::vector<int32_t> slots;
  for (const int64_t id : request->ids) {
    const auto entry = entries_.find(id);
    slots.push_back(entry == entries_.end() ? static_cast<int32_t>(id) : entry->second.slot);
  }
  if (request->held.size() < request->needed.size() || !request->fault.why.empty()) slots.clear();
  release(*request);
  if (!std::exchange(request->is_over, true)) {
    deferred.calls.push_back([request, slots = std::move(slots)] {
      std::exchange(request->done, nullptr)(request->fault, slots);
    });
  }
}

// Under the mutex.
void Pool::hold(Entry& entry) {
  held_ += entry.holders++ == 0;
}

// Under the mutex.
void Pool::release(SlotRequest& request) {
  for (const int64_t expert : request.held) held_ -= --entries_.at(expert).holders == 0;
  request.held.clear();
}

// Begins requests for which there are slots now. Under the mutex.
void Pool::assign_waiting(DeferredWork& deferred) {
  std::vector<std::shared_ptr<SlotRequest>> still;
  for (const std::shared_ptr<SlotRequest>& request : waiting_)
    if (!assign(request, deferred)) still.push_back(request);
  waiting_ = std::move(still);
}

void Pool::loaded(int64_t expert, const ReadFault& fault) {
  DeferredWork deferred;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = loading_.find(expert);
    const Loading loading = std::move(found->second);
    loading_.erase(found);
    for (const HostRows& rows : slots_) rows.bump_version();
    if (fault.why.empty()) {
      order_.push_back(expert);
      entries_.emplace(expert, Entry{loading.slot, 0, std::prev(order_.end())});
    } else {
      free_.push_back(loading.slot);
    }
    for (const std::shared_ptr<SlotRequest>& request : loading.waiting) {
      if (request->is_over) continue;
      if (!fault.why.empty()) {
        if (request->fault.why.empty()) request->fault = fault;
      } else {
        hold(entries_.at(expert));
        request->held.push_back(expert);
      }
      if (--request->left > 0) continue;
      disk_->counters.nanoseconds += (std::chrono::steady_clock::now() - request->began).count();
      finish(request, deferred);
    }
    assign_waiting(deferred);
  }
  act(deferred);
}

void Pool::abandon(const std::shared_ptr<SlotRequest>& request) {
  DeferredWork deferred;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(request->is_over, true)) return;
    release(*request);
    request->done = nullptr;
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), request), waiting_.end());
    assign_waiting(deferred);
  }
  act(deferred);
}

void Pool::act(DeferredWork& deferred) {
  disk_->read(deferred.reads);
  for (const std::function<void()>& call : deferred.calls) call();
}

void Pool::copy(const std::vector<int64_t>& experts, const std::vector<HostRows>& to,
                const std::function<void(const std::vector<int64_t>&)>& read_others) {
  SlotRequest holder;
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
  DeferredWork deferred;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    release(holder);
    assign_waiting(deferred);
  }
  act(deferred);
}

}  // namespace moe_mps
