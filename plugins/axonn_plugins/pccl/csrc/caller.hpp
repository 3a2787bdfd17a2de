// What all calls of a group's have in common: they are numbered, handed to the engine, and refused where they make no sense.
#pragma once

#include <torch/version.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "calls.hpp"
#include "direct.hpp"
#include "overlap.hpp"
#include "reduce.hpp"

namespace pccl {

class Caller : public c10d::Backend, public Planned {
 public:
  Caller(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout, py::object plan)
      : Backend(rank, size), core_(std::move(core)), key_(key), timeout_(timeout), plan_(kept(std::move(plan))) {
    // The engine's thread must not be the one that lets the planner go.
    core_->engine.attend(key_, [finisher = core_->finisher, plan = std::weak_ptr(plan_)](int peer) {
      finisher->post([plan, peer] {
        auto asked = plan.lock();
        if (!asked) return;
        py::gil_scoped_acquire locked;
        asked->attr("reach")(peer);
      });
    });
  }
  ~Caller() override { end("destroyed its process group"); }

  const std::string getBackendName() const override { return "pccl"; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  c10::intrusive_ptr<Options> getBackendOptions() override {
    auto milliseconds = std::chrono::milliseconds(static_cast<int64_t>(timeout_ * 1000));
    return c10::make_intrusive<Options>("pccl", milliseconds);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = static_cast<double>(timeout.count()) / 1000; }
#endif
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void shutdown() override { end("shut its process group down"); }
  void abort() override { end("aborted its process group"); }

  py::object planner() const override { return *plan_; }
  void forget() override {
    std::lock_guard lock(order_);
    programs_.clear();
  }

 protected:
  using CallPointer = c10::intrusive_ptr<Call>;

  CallPointer make(c10d::OpType kind, const Tensors& outputs, size_t runs = 1) {
    bool point = kind == c10d::OpType::SEND || kind == c10d::OpType::RECV || kind == c10d::OpType::RECVANYSOURCE;
    if (!point) callbacks_->wait(timeout_);
    auto call = c10::make_intrusive<Call>(rank_, kind, outputs, core_->finisher, callbacks_, sequence_);
    call->expect(static_cast<int>(runs));
    if (!point) call->enter(earlier_);
    return call;
  }

  // Where arguments make no sense this rank raises, and peers that wait for the call are told why.
  template <class... Words>
  void require(bool right, const Words&... words) {
    if (right) return;
    core_->engine.refuse(key_, sequence_ + 1, c10::str(words...));
    demand(false, words...);
  }
  // The same where no others wait for it as one of the group's calls.
  template <class... Words>
  static void demand(bool right, const Words&... words) {
    if (!right) C10_THROW_ERROR(ValueError, c10::str("pccl: ", words...));
  }
  void require_cpu(const char* name, const at::Tensor& tensor) {
    require(tensor.device().is_cpu() && tensor.layout() == at::kStrided, name, " of a tensor on ", tensor.device(), " with layout ",
            tensor.layout(), " is not possible here; pass a dense one on the CPU");
  }
  // The only one of a list of tensors.
  const at::Tensor& one(const char* name, const Tensors& tensors) {
    require(tensors.size() == 1, name, " of ", tensors.size(), " tensors at once is not possible; make a call for each");
    require_cpu(name, tensors[0]);
    return tensors[0];
  }
  Reduction reduction(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
    auto found = reduction_of(op);
    require(found && can_reduce(wire_type_of(tensor), *found), name, " of ", tensor.scalar_type(), " by ", op_name(op),
            " is not possible; choose another operation or type");
    return *found;
  }

  // Contiguous memory for what is then copied to `output`, or that itself.
  static at::Tensor landing(Call& call, const at::Tensor& output) {
    if (output.is_contiguous()) return output;
    at::Tensor flat = at::empty(output.sizes(), output.options());
    call.copy_back(output, flat);
    return flat;
  }
  double seconds(std::chrono::milliseconds timeout) const {
    return timeout == c10d::kUnsetTimeout ? timeout_ : static_cast<double>(timeout.count()) / 1000;
  }
  static Done arrived(CallPointer call) {
    return [call = std::move(call)](const std::string& error) mutable { Call::arrived(std::move(call), error); };
  }
  // Whether the caller, who waits anyway, may do the work.
  static bool here(const Call& call, bool asynchronous) { return !asynchronous && call.single() && !PyGILState_Check(); }

  // A call with a schedule, on memory for all blocks or for one.
  void run(const CallPointer& call, Signature signature, Collective planned, const at::Tensor& input, const at::Tensor& output,
           std::chrono::milliseconds timeout, bool asynchronous, int root = 0) {
    ProgramPointer program = programme(planned, signature.elements * type_bytes(signature.type), root);
    signature.schedule = program->digest;
    at::Tensor from = apart(planned, rank_, input, output);
    call->hold(from);
    call->hold(output);
    std::unique_lock lock(order_);
    Begun begun = core_->engine.start(key_, ++sequence_, std::move(program), signature, from.data_ptr(), output.data_ptr(),
                                      seconds(timeout), arrived(call), here(*call, asynchronous));
    lock.unlock();
    core_->engine.lead(std::move(begun));
  }

  // A call without one, on contiguous tensors.
  void run(const CallPointer& call, Signature signature, ProgramPointer program, const Tensors& inputs, const Tensors& outputs,
           std::chrono::milliseconds timeout, bool asynchronous) {
    meet(*program, signature);
    std::unique_lock lock(order_);
    Begun begun = core_->engine.start(key_, ++sequence_, std::move(program), signature, pieces(*call, apart(rank_, inputs, outputs)), pieces(*call, outputs),
                                      seconds(timeout), arrived(call), here(*call, asynchronous));
    lock.unlock();
    core_->engine.lead(std::move(begun));
  }

  // A message to or from one rank, or from any where that is -1.
  WorkPointer pass(c10d::OpType kind, const Tensors& tensors, int peer, int tag) {
    bool sends = kind == c10d::OpType::SEND;
    const char* name = sends ? "send" : "recv";
    demand(peer < size_ && peer != rank_ && size_ > 1, name, " with rank ", peer, " of the group on rank ", rank_,
           " of it is not possible; name another of its ", size_, " ranks");
    demand(tag >= 0, name, " with tag ", tag, " is not possible; take one from 0 on");
    demand(tensors.size() == 1, name, " of ", tensors.size(), " tensors at once is not possible; make a call for each");
    const at::Tensor& tensor = tensors[0];
    demand(tensor.device().is_cpu() && tensor.layout() == at::kStrided, name, " of a tensor on ", tensor.device(), " with layout ", tensor.layout(),
           " is not possible here; pass a dense one on the CPU");
    auto call = make(kind, {tensor});
    at::Tensor flat = sends ? tensor.contiguous() : landing(*call, tensor);
    ProgramPointer program = point(size_, rank_, sends ? Kind::kSend : Kind::kReceive, peer, static_cast<uint32_t>(tag));
    Signature signature{Collective::kPoint, wire_type_of(tensor), Reduction::kNone, wire_elements(tensor)};
    meet(*program, signature);
    Tensors held{flat}, none;
    std::lock_guard lock(order_);
    uint64_t number = kPoints + ++points_;
    call->point(core_->engine, key_, number, peer < 0);
    core_->engine.start(key_, number, std::move(program), signature, pieces(*call, sends ? held : none), pieces(*call, sends ? none : held),
                        timeout_, arrived(call), false, call->source());
    return call;
  }

 private:
  static std::vector<Piece> pieces(Call& call, const Tensors& tensors) {
    std::vector<Piece> made;
    for (const auto& tensor : tensors) {
      call.hold(tensor);
      made.push_back({static_cast<char*>(tensor.data_ptr()), tensor.nbytes()});
    }
    return made;
  }

  static std::string op_name(const c10d::ReduceOp& op) {
    static const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
    size_t number = static_cast<c10d::ReduceOp::RedOpType>(op);
    return number < std::size(names) ? names[number] : "an unknown operation";
  }

  // Has links to all ranks that a program sends to, which Python makes.
  void meet(const Program& program, const Signature& signature) {
    core_->engine.check_process();  // before links are made in its name
    std::vector<int> unmet;
    {
      std::lock_guard lock(order_);
      for (const Op& op : program.ops)
        if (op.kind == Kind::kSend && !met_.contains(op.peer)) unmet.push_back(op.peer);
    }
    if (unmet.empty()) return;
    {
      py::gil_scoped_acquire locked;
      plan_->attr("meet")(unmet, signature.text(), signature.collective == Collective::kPoint ? 0 : sequence_ + 1);
    }
    std::lock_guard lock(order_);
    met_.insert(unmet.begin(), unmet.end());
  }

  // The schedule for so many bytes; Python chooses, and makes it and the links that it needs when it is asked for first.
  ProgramPointer programme(Collective collective, size_t bytes, int root) {
    core_->engine.check_process();
    {
      std::lock_guard lock(order_);
      auto found = programs_.find({collective, bytes, root});
      if (found != programs_.end()) return found->second;
    }
    py::gil_scoped_acquire locked;
    auto made = (*plan_)(static_cast<int>(collective), bytes, root, sequence_ + 1).template cast<std::shared_ptr<Program>>();
    std::lock_guard lock(order_);
    return programs_[{collective, bytes, root}] = made;
  }

  void end(const char* what) {
    std::lock_guard lock(order_);
    core_->engine.remove_group(key_, what, sequence_);
  }

 protected:
  std::shared_ptr<Core> core_;
  uint64_t key_, sequence_ = 0;

 private:
  uint64_t points_ = 0;
  double timeout_;
  std::shared_ptr<py::object> plan_;
  std::shared_ptr<Callbacks> callbacks_ = std::make_shared<Callbacks>();
  std::shared_ptr<Earlier> earlier_ = std::make_shared<Earlier>();
  std::mutex order_;
  std::set<int> met_;
  std::map<std::tuple<Collective, size_t, int>, ProgramPointer> programs_;
};

}  // namespace pccl
