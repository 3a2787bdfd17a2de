// Which of a group's collectives are under way, for a barrier that ends behind those made before it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace pccl {

class Earlier {
 public:
  // A collective begins; its number.
  uint64_t begin() {
    std::lock_guard lock(mutex_);
    under_way_.insert(++last_);
    return last_;
  }
  // It is done, or never began after all; harmless when called again.
  void end(uint64_t number) {
    std::vector<std::function<void()>> due;
    {
      std::lock_guard lock(mutex_);
      if (!under_way_.erase(number)) return;
      auto later = std::ranges::partition(waiting_, [this](const Waiting& each) { return !first(each.first); });
      for (Waiting& each : later) due.push_back(std::move(each.second));
      waiting_.erase(later.begin(), later.end());
    }
    for (auto& then : due) then();
  }
  // Calls `then` once all that began before a number have ended; false where they have already, and it is not called.
  bool after(uint64_t number, std::function<void()> then) {
    std::lock_guard lock(mutex_);
    if (first(number)) return false;
    waiting_.emplace_back(number, std::move(then));
    return true;
  }

 private:
  using Waiting = std::pair<uint64_t, std::function<void()>>;

  bool first(uint64_t number) const { return under_way_.empty() || *under_way_.begin() >= number; }

  std::mutex mutex_;
  uint64_t last_ = 0;
  std::set<uint64_t> under_way_;
  std::vector<Waiting> waiting_;
};

}  // namespace pccl
