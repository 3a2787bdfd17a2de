// What torch holds of a call: its future, its tensors, and the thread that completes it.
#pragma once

#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "delegate.hpp"
#include "engine.hpp"

namespace pccl {

// Completes futures: what hangs on them may call collectives, for which the engine's thread must be free.
class Finisher {
 public:
  Finisher() : thread_([this] { loop(); }) {}
  ~Finisher() {
    post(nullptr);
    thread_.join();
  }
  void post(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    if (closed_) {
      new std::function<void()>(std::move(task));  // nor may what it holds be let go
      return;
    }
    tasks_.push(std::move(task));
    ready_.notify_one();
  }
  // Returns when it is idle, and stays so: a thread that asks for the interpreter's lock while that ends is ended itself,
  // and the process with it.
  void close() {
    if (process_ != getpid()) return;  // a forked child has no such thread
    std::unique_lock lock(mutex_);
    closed_ = true;
    idle_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  }

 private:
  void loop() {
    while (true) {
      std::unique_lock lock(mutex_);
      busy_ = false;
      idle_.notify_all();
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop();
      busy_ = true;
      lock.unlock();
      if (!task) return;
      try {
        task();
      } catch (const std::exception& error) {
        TORCH_WARN("pccl: a callback of a finished call failed: ", error.what());
      }
    }
  }
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable ready_, idle_;
  bool busy_ = false, closed_ = false;
  std::queue<std::function<void()>> tasks_;
  std::thread thread_;
};

// One call of the user's, of one or more runs of the engine.
class Call : public c10d::Work {
 public:
  Call(int rank, c10d::OpType kind, Tensors outputs, std::shared_ptr<Finisher> finisher, uint64_t sequence)
      : Work(rank, kind), outputs_(std::move(outputs)), finisher_(std::move(finisher)), sequence_(sequence),
        future_(c10::make_intrusive<at::ivalue::Future>(c10::ListType::ofTensors())) {}

  void expect(int runs) {
    left_ = runs;
    single_ = runs == 1;
  }
  bool single() const { return single_; }
  void hold(const at::Tensor& tensor) { held_.push_back(tensor); }
  void copy_back(const at::Tensor& to, const at::Tensor& from) { copies_.emplace_back(to, from); }

  // One of its runs is done. Takes the run's hold on the call: to let a tensor go may need the interpreter's lock, for which
  // the engine should not wait. The thread that made the call has all of it in hand, and no callbacks can be there yet.
  static void arrived(c10::intrusive_ptr<Call> self, const std::string& error) {
    {
      std::lock_guard lock(self->parts_);
      if (!error.empty()) self->error_ = error;
      if (--self->left_ > 0) return;
    }
    std::exception_ptr failed;
    if (!self->error_.empty()) failed = std::make_exception_ptr(std::runtime_error("pccl: " + self->error_));
    if (!failed) {
      try {
        c10::InferenceMode guard(false);
        at::NoGradGuard no_grad;
        for (auto& [to, from] : self->copies_) to.copy_(from);
      } catch (...) {
        failed = std::current_exception();
      }
    }
    self->finish(failed);
    if (self->maker_ == std::this_thread::get_id()) return self->settle(failed);
    Finisher& finisher = *self->finisher_;
    finisher.post([self = std::move(self), failed] { self->settle(failed); });
  }

  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  // What is under way cannot be taken back; the group's end ends it.
  void abort() override {}

 private:
  void settle(const std::exception_ptr& failed) {
    copies_.clear();
    held_.clear();
    if (failed) future_->setError(failed);
    else future_->markCompleted(c10::IValue(outputs_));
  }

  Tensors outputs_, held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::shared_ptr<Finisher> finisher_;
  uint64_t sequence_;
  const std::thread::id maker_ = std::this_thread::get_id();
  c10::intrusive_ptr<at::ivalue::Future> future_;
  std::mutex parts_;
  int left_ = 1;
  bool single_ = true;
  std::string error_;
};

// The engine and the thread beside it, for as long as a group lives.
struct Core {
  std::shared_ptr<Finisher> finisher = std::make_shared<Finisher>();
  Engine engine;
};

void define_doors(py::module_& module);

// What is known of a call that was left to another backend.
struct Ticket {
  std::shared_ptr<Core> core;
  uint64_t group;
  std::weak_ptr<py::object> plan;  // to let it go may need the interpreter, which gloo's threads must not wait for
  std::string what;
  int peer = -1;                 // of a send or receive
  uint64_t sequence = 0;         // of a collective
  std::shared_ptr<Watch> watch;  // likewise

  // Whether gloo's connections are of no use any more; else it has refused one call, such as one on numbers that it does not know.
  static bool final(const std::string& why) {
    return why.find("gloo/transport") != std::string::npos || why.find("pair closure") != std::string::npos;
  }

  // The group is out of order as this call failed, if it is not already; what is said of it.
  std::string fail(const std::string& why) const {
    std::string known = core->engine.broken(group);
    if (!known.empty()) return known;
    auto asked = plan.lock();
    if (!asked) return "its process group was destroyed: " + why;
    {
      py::gil_scoped_acquire locked;
      known = asked->attr("failed")(what, peer, sequence, why).cast<std::string>();
    }
    core->engine.give_up(group, known);
    return known;
  }
};

// A call that was left to another backend. Where it fails, so does the group, and all are told why.
class Left : public c10d::Work {
 public:
  Left(c10d::OpType kind, WorkPointer work, std::shared_ptr<Ticket> ticket)
      : Work(-1, kind), work_(std::move(work)), ticket_(std::move(ticket)) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      if (ticket_->watch) future = work_->getFuture();
    } catch (const std::exception&) {  // it has none
      ticket_->watch->over = true;
    }
    if (!future) return;
    future->addCallback([ticket = ticket_](c10::ivalue::Future& done) {
      ticket->watch->over = true;
      std::string why = done.hasError() ? done.tryRetrieveErrorMessage() : "";
      if (Ticket::final(why)) ticket->core->finisher->post([ticket, why] { ticket->fail(why); });
    });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      return work_->wait(timeout);
    } catch (const std::exception& error) {
      std::string why = error.what();
      if (!Ticket::final(why) || !work_->isCompleted()) throw;  // or who waits has lost patience
      throw std::runtime_error("pccl: " + ticket_->fail(why));
    }
  }
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  Tensors result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  WorkPointer work_;
  std::shared_ptr<Ticket> ticket_;
};

// A group's backend.
BackendPointer make_shim(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout, BackendPointer inner, py::object plan);

}  // namespace pccl
