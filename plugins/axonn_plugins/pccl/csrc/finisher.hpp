// Threads that complete futures, beside the engine's.
#pragma once

#include <c10/util/Exception.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <queue>
#include <system_error>
#include <thread>
#include <utility>

namespace pccl {

// Runs tasks, each as soon as it is posted: what hangs on a future may itself wait for another call's future, and does not
// keep that from being completed. Before a thread begins a task another one waits for the next. Never destroyed.
class Finisher {
 public:
  Finisher() { add_thread(); }
  Finisher(const Finisher&) = delete;

  void post(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    if (closed_) {
      new std::function<void()>(std::move(task));  // nor may what it holds be let go
      return;
    }
    tasks_.push(std::move(task));
    ready_.notify_one();
  }
  // Returns when nothing is left to do, or what is left waits for what does not come; from then on nothing is done: a thread
  // that asks for the interpreter's lock while that ends is ended itself, and the process with it.
  void close() {
    if (process_ != getpid()) return;  // a forked child has no such threads
    std::unique_lock lock(mutex_);
    idle_.wait_for(lock, kGrace, [this] { return tasks_.empty() && busy_ == 0; });
    closed_ = true;
  }

 private:
  static constexpr int kSpare = 4;  // threads that stay
  static constexpr std::chrono::seconds kGrace{10};

  void add_thread() {
    ++waiting_;
    std::thread([this] { loop(); }).detach();
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop();
      --waiting_;
      ++busy_;
      if (waiting_ == 0) {
        try {
          add_thread();
        } catch (const std::system_error&) {
          --waiting_;  // there is none to be had: what comes next waits for this task
        }
      }
      lock.unlock();
      try {
        task();
      } catch (const std::exception& error) {
        TORCH_WARN("pccl: a callback of a finished call failed: ", error.what());
      }
      task = nullptr;  // before others may think that it is done
      lock.lock();
      --busy_;
      idle_.notify_all();
      if (waiting_ >= kSpare) return;
      ++waiting_;
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable ready_, idle_;
  int waiting_ = 0, busy_ = 0;  // threads
  bool closed_ = false;
  std::queue<std::function<void()>> tasks_;
};

}  // namespace pccl
