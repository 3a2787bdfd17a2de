// What torch holds of a call: its future and its tensors.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "callbacks.hpp"
#include "delegate.hpp"
#include "earlier.hpp"
#include "engine.hpp"
#include "finisher.hpp"

namespace pccl {

// One call of the user's, of one or more runs of the engine.
class Call : public c10d::Work {
 public:
  Call(int rank, c10d::OpType kind, Tensors outputs, std::shared_ptr<Finisher> finisher, std::shared_ptr<Callbacks> callbacks,
       uint64_t sequence)
      : Work(rank, kind), outputs_(std::move(outputs)), finisher_(std::move(finisher)), callbacks_(std::move(callbacks)), sequence_(sequence) {}
  ~Call() override { leave(); }

  void expect(int runs) {
    left_ = runs;
    single_ = runs == 1;
  }
  bool single() const { return single_; }
  // It counts among a group's collectives until it is done.
  void enter(std::shared_ptr<Earlier> earlier) {
    earlier_ = std::move(earlier);
    number_ = earlier_->begin();
  }
  // Is done only when all collectives that the group began before it are.
  static void follow(const c10::intrusive_ptr<Call>& self) {
    self->expect(2);
    if (!self->earlier_->after(self->number_, [self] { arrived(self, ""); })) self->expect(1);
  }
  // This is a message between two ranks, whose time begins when somebody waits for it; `source`: it may come from any.
  void point(Engine& engine, uint64_t group, uint64_t number, bool source) {
    hurry_ = [&engine, group, number] { engine.hurry(group, number); };
    any_ = source;
  }
  int* source() { return any_ ? &source_ : nullptr; }
  int sourceRank() const override { return any_ ? source_ : Work::sourceRank(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (hurry_ && !isCompleted()) hurry_();
    bool done = Work::wait(timeout);
    // Who has it may look at it from now on.
    if (auto future = made(); future && !future->completed()) future->wait();
    return done;
  }
  void hold(const at::Tensor& tensor) { held_.push_back(tensor); }
  // What its future has instead of the outputs.
  void promise(at::Tensor value) { promised_ = {std::move(value)}; }
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
        for (auto& [to, from] : self->copies_) {
          // What was made in inference mode is written in it alone, and other tensors stay fit for autograd.
          c10::InferenceMode guard(to.is_inference());
          at::NoGradGuard no_grad;  // within the guard, which would end it
          to.copy_(from);
        }
      } catch (...) {
        failed = std::current_exception();
      }
    }
    self->finish(failed);
    self->leave();
    if (self->maker_ == std::this_thread::get_id()) return self->settle();
    Finisher& finisher = *self->finisher_;
    finisher.post([self = std::move(self)] { self->settle(); });
  }

  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (hurry_ && !isCompleted()) hurry_();
    std::lock_guard lock(parts_);
    if (!future_) {
      future_ = c10::make_intrusive<at::ivalue::Future>(c10::ListType::ofTensors());
      if (isCompleted()) complete();
    }
    // A message's callbacks come in no order among the group's calls.
    if (!hurry_ && !future_->completed() && !taken_ && PyGILState_Check()) {
      taken_ = true;
      callbacks_->open(this);
    }
    return future_;
  }
  uint64_t getSequencenumber() const override { return sequence_; }
  // What is under way cannot be taken back; the group's end ends it.
  void abort() override {}

 private:
  void leave() {
    if (earlier_) earlier_->end(number_);
  }
  void settle() {
    copies_.clear();
    held_.clear();
    std::unique_lock lock(parts_);
    if (future_ && !future_->completed()) {
      lock.unlock();
      Callbacks::Running running(within_, this);
      complete();
      lock.lock();
    }
    if (taken_) callbacks_->close(this);
  }
  c10::intrusive_ptr<c10::ivalue::Future> made() {
    std::lock_guard lock(parts_);
    return future_;
  }
  void complete() {
    if (auto failed = exception()) future_->setError(failed);
    else future_->markCompleted(c10::IValue(promised_.empty() ? outputs_ : promised_));
  }

  Tensors outputs_, promised_;
  c10::SmallVector<at::Tensor, 2> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::shared_ptr<Finisher> finisher_;
  std::shared_ptr<Callbacks> callbacks_;
  std::shared_ptr<Earlier> earlier_;
  uint64_t number_ = 0;
  const Callbacks::Calls within_ = Callbacks::running();
  uint64_t sequence_;
  const std::thread::id maker_ = std::this_thread::get_id();
  c10::intrusive_ptr<at::ivalue::Future> future_;  // made when it is asked for, as few are
  std::mutex parts_;
  int left_ = 1;
  bool single_ = true, taken_ = false;
  std::string error_;
  std::function<void()> hurry_;
  bool any_ = false;
  int source_ = -1;
};

// The engine and the threads beside it, for as long as a group lives.
struct Core {
  std::shared_ptr<Finisher> finisher = std::make_shared<Finisher>();
  Engine engine;
};

// A group's backend for the CPU's tensors.
BackendPointer make_shim(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout, py::object plan);

}  // namespace pccl
