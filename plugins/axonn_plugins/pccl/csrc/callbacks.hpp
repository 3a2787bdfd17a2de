// The order of a group's calls where callbacks make some of them.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "delegate.hpp"

namespace pccl {

// A call whose future Python has taken may have callbacks, and those may make calls of the same group, by another thread: on one
// rank before this thread's next call, on another after it. So that next call waits until they have returned, on every rank.
class Callbacks {
 public:
  // The call may have callbacks from now on.
  void open(const void* call) {
    std::lock_guard lock(mutex_);
    open_.push_back(call);
  }
  void close(const void* call) {
    std::lock_guard lock(mutex_);
    std::erase(open_, call);
    closed_.notify_all();
  }
  // Returns when those of all other calls have returned, or after so many seconds: they wait for what this call is needed for.
  void wait(double seconds) {
    std::unique_lock lock(mutex_);
    auto over = [this] {
      return std::ranges::all_of(open_, [](const void* call) { return std::ranges::find(running_, call) != running_.end(); });
    };
    if (over()) return;
    lock.unlock();
    Unlocked unlocked;
    lock.lock();
    closed_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e6)), over);
    lock.unlock();
  }
  // The calls whose callbacks this thread runs, or wait for what it does.
  using Calls = std::vector<const void*>;
  static const Calls& running() { return running_; }
  // While this thread runs the callbacks of a call, which was made when `within` were running.
  class Running {
   public:
    Running(Calls within, const void* call) : before_(std::exchange(running_, std::move(within))) { running_.push_back(call); }
    ~Running() { running_ = std::move(before_); }
    Running(const Running&) = delete;

   private:
    Calls before_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable closed_;
  Calls open_;
  static inline thread_local Calls running_;
};

}  // namespace pccl
