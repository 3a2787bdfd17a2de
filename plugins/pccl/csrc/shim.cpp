// The torch.distributed backend "pccl": collectives by the engine, all else by an inner backend.
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <queue>
#include <thread>

#include "delegate.hpp"
#include "engine.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

using c10d::Work;

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
class Call : public Work {
 public:
  Call(int rank, c10d::OpType kind, Tensors outputs, std::shared_ptr<Finisher> finisher, uint64_t sequence)
      : Work(rank, kind), outputs_(std::move(outputs)), finisher_(std::move(finisher)), sequence_(sequence),
        future_(c10::make_intrusive<at::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

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

class Shim : public Delegate, public Planned {
 public:
  Shim(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout,
       BackendPointer inner, py::object plan)
      : Delegate(rank, size, std::move(inner)), core_(std::move(core)), key_(key), timeout_(timeout), plan_(kept(std::move(plan))) {}
  ~Shim() override { core_->engine.remove_group(key_, "rank " + std::to_string(rank_) + " destroyed its process group"); }

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = static_cast<double>(timeout.count()) / 1000; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void shutdown() override {
    core_->engine.remove_group(key_, "rank " + std::to_string(rank_) + " shut its process group down");
    inner_->shutdown();
  }
  void abort() override {
    core_->engine.remove_group(key_, "rank " + std::to_string(rank_) + " aborted its process group");
    inner_->abort();
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() != 1 || !knows(tensors[0], options.reduceOp)) return inner_->allreduce(tensors, options);
    if (!native(Collective::kAllReduce, tensors[0], options.reduceOp)) return reduced(tensors, options);
    return leave(c10d::OpType::ALLREDUCE, tensors[0], tensors[0], [&](at::Tensor& data, at::Tensor&) {
      Tensors one{data};
      return inner_->allreduce(one, options);
    });
  }

  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (const auto& tensor : tensors)
      if (!knows(tensor, options.reduceOp)) return inner_->allreduce_coalesced(tensors, options);
    return reduced(tensors, options);
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!knows(input)) return inner_->_allgather_base(output, input, options);
    if (native(Collective::kAllGather, output))
      return leave(c10d::OpType::_ALLGATHER_BASE, output, input,
                   [&](at::Tensor& to, at::Tensor& from) { return inner_->_allgather_base(to, from, options); });
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "pccl: all_gather of ", inputs.size(), " inputs into ", outputs.size(), " outputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!knows(inputs[i])) return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
      TORCH_CHECK(outputs[i].scalar_type() == inputs[i].scalar_type() && outputs[i].numel() == inputs[i].numel() * size_,
                  "pccl: all_gather into ", outputs[i].numel(), " ", outputs[i].scalar_type(), ", expected ", size_, " times ",
                  inputs[i].numel(), " ", inputs[i].scalar_type(), " of the input");
    }
    auto call = make(c10d::OpType::_ALLGATHER_BASE, outputs, inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) gather(call, outputs[i], inputs[i], options);
    return call;
  }

  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (inputs.size() != 1 || outputs.size() != 1 || !knows(inputs[0]) || !alike(outputs[0], inputs[0]))
      return inner_->allgather(outputs, inputs, options);
    auto call = make(c10d::OpType::ALLGATHER, outputs[0], 1);
    gather(call, joined(*call, outputs[0], true), inputs[0], options);
    return call;
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (!knows(input, options.reduceOp)) return inner_->_reduce_scatter_base(output, input, options);
    if (native(Collective::kReduceScatter, input, options.reduceOp)) return summed(output, input, options);
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "pccl: reduce_scatter of ", inputs.size(), " inputs into ", outputs.size(), " outputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!knows(inputs[i], options.reduceOp)) return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
      check(outputs[i], inputs[i]);
    }
    auto call = make(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) scatter(call, outputs[i], inputs[i], options);
    return call;
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    if (outputs.size() != 1 || inputs.size() != 1 || !knows(outputs[0], options.reduceOp) || !alike(inputs[0], outputs[0]))
      return inner_->reduce_scatter(outputs, inputs, options);
    auto call = make(c10d::OpType::REDUCE_SCATTER, outputs, 1);
    scatter(call, outputs[0], joined(*call, inputs[0], false), options);
    return call;
  }

  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    if (options.device && !options.device->is_cpu()) return inner_->barrier(options);
    auto token = at::zeros({1}, at::kByte);
    auto call = make(c10d::OpType::BARRIER, {}, 1);
    run(call, {Collective::kBarrier, Type::kU8, Reduction::kMax, 1}, token, token, options.timeout, options.asyncOp);
    return call;
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (tensors.size() != 1 || !knows(tensors[0])) return inner_->broadcast(tensors, options);
    const at::Tensor& tensor = tensors[0];
    auto call = make(c10d::OpType::BROADCAST, tensors, 1);
    at::Tensor flat = tensor.contiguous();
    if (!flat.is_same(tensor) && options.rootRank != rank_) call->copy_back(tensor, flat);
    run(call, {Collective::kBroadcast, *type_of(tensor), Reduction::kNone, static_cast<uint64_t>(flat.numel())}, flat, flat,
        options.timeout, options.asyncOp, static_cast<int>(options.rootRank));
    return call;
  }

  py::object planner() const override { return *plan_; }
  void forget() override {
    std::lock_guard lock(order_);
    programs_.clear();
  }

 private:
  using CallPointer = c10::intrusive_ptr<Call>;

  static bool knows(const at::Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.layout() == at::kStrided && type_of(tensor).has_value();
  }
  static bool knows(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    auto reduction = reduction_of(op);
    return knows(tensor) && reduction && can_reduce(*type_of(tensor), *reduction);
  }
  bool alike(const Tensors& parts, const at::Tensor& one) const {
    if (parts.size() != static_cast<size_t>(size_)) return false;
    for (const auto& part : parts)
      if (!knows(part) || part.sizes() != one.sizes() || part.scalar_type() != one.scalar_type()) return false;
    return true;
  }
  // Tensors of a list as one; `back`: what comes to lie there is copied to them.
  static at::Tensor joined(Call& call, const Tensors& parts, bool back) {
    int64_t each = parts[0].numel();
    at::Tensor flat = at::empty({each * static_cast<int64_t>(parts.size())}, parts[0].options());
    for (size_t i = 0; i < parts.size(); ++i) {
      at::Tensor part = flat.narrow(0, static_cast<int64_t>(i) * each, each).view(parts[i].sizes());
      if (back) call.copy_back(parts[i], part);
      else part.copy_(parts[i]);
    }
    return flat;
  }

  CallPointer make(c10d::OpType kind, const Tensors& outputs, size_t runs) {
    auto call = c10::make_intrusive<Call>(rank_, kind, outputs, core_->finisher, sequence_);
    call->expect(static_cast<int>(runs));
    return call;
  }

  WorkPointer reduced(Tensors& tensors, const c10d::AllreduceOptions& options) {
    auto call = make(c10d::OpType::ALLREDUCE, tensors, tensors.size());
    for (const auto& tensor : tensors) {
      at::Tensor flat = tensor.contiguous();
      if (!flat.is_same(tensor)) call->copy_back(tensor, flat);
      run(call, {Collective::kAllReduce, *type_of(tensor), *reduction_of(options.reduceOp), static_cast<uint64_t>(flat.numel())},
          flat, flat, options.timeout, options.asyncOp);
    }
    if (tensors.empty()) Call::arrived(call, "");
    return call;
  }

  // Contiguous memory for what is then copied to `output`, or that itself.
  static at::Tensor landing(Call& call, const at::Tensor& output) {
    if (output.is_contiguous()) return output;
    at::Tensor flat = at::empty(output.sizes(), output.options());
    call.copy_back(output, flat);
    return flat;
  }

  void gather(const CallPointer& call, const at::Tensor& output, const at::Tensor& input, const c10d::AllgatherOptions& options) {
    run(call, {Collective::kAllGather, *type_of(input), Reduction::kNone, static_cast<uint64_t>(output.numel())}, input.contiguous(),
        landing(*call, output), options.timeout, options.asyncOp);
  }

  void scatter(const CallPointer& call, const at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& options) {
    run(call, {Collective::kReduceScatter, *type_of(input), *reduction_of(options.reduceOp), static_cast<uint64_t>(input.numel())},
        input.contiguous(), landing(*call, output), options.timeout, options.asyncOp);
  }

  void run(const CallPointer& call, Signature signature, const at::Tensor& input, const at::Tensor& output,
           std::chrono::milliseconds timeout, bool asynchronous, int root = 0) {
    size_t bytes = signature.elements * type_bytes(signature.type);
    std::shared_ptr<const Program> program = programme(signature.collective, bytes, root);
    signature.schedule = program->digest;
    call->hold(input);
    call->hold(output);
    double seconds = timeout == c10d::kUnsetTimeout ? timeout_ : static_cast<double>(timeout.count()) / 1000;
    bool here = !asynchronous && call->single() && !PyGILState_Check();
    std::unique_lock lock(order_);
    Begun begun = core_->engine.start(key_, ++sequence_, std::move(program), signature, input.data_ptr(), output.data_ptr(), seconds,
                                      [call](const std::string& error) mutable { Call::arrived(std::move(call), error); }, here);
    lock.unlock();
    core_->engine.lead(std::move(begun));
  }

  // Whether a collective is better left to the inner backend, which must be able to do it: `whole` holds all blocks. All ranks
  // answer alike: it depends on nothing that is only this rank's, such as strides.
  bool native(Collective collective, const at::Tensor& whole, const c10d::ReduceOp& op = c10d::ReduceOp::SUM) {
    auto type = whole.scalar_type();
    bool able = op != c10d::ReduceOp::AVG && type != at::kShort && type != at::kBool;
    return able && !programme(collective, whole.nbytes(), 0, true);
  }

  // What `inner(output, input)` does, on copies where this rank's tensors have gaps.
  template <class Inner>
  WorkPointer leave(c10d::OpType kind, at::Tensor& output, at::Tensor& input, const Inner& inner) {
    if (output.is_contiguous() && input.is_contiguous()) return inner(output, input);
    auto call = make(kind, {output}, 1);
    at::Tensor from = input.contiguous(), to = output.is_same(input) ? from : landing(*call, output);
    if (to.is_same(from)) call->copy_back(output, from);
    call->hold(from);
    call->hold(to);
    return after(inner(to, from), call);
  }

  // A reduce-scatter by the inner backend's all-reduce: gloo's own is one, too, but its work ends only when somebody waits for it,
  // and has no future.
  WorkPointer summed(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& options) {
    check(output, input);
    auto call = make(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, 1);
    Tensors sums{input.clone(at::MemoryFormat::Contiguous)};
    call->copy_back(output, sums[0].view({-1}).narrow(0, rank_ * output.numel(), output.numel()).view(output.sizes()));
    c10d::AllreduceOptions asked;
    asked.reduceOp = options.reduceOp;
    asked.timeout = options.timeout;
    return after(inner_->allreduce(sums, asked), call);
  }

  // A call that is done when the inner backend's work is.
  static WorkPointer after(const WorkPointer& work, const CallPointer& call) {
    work->getFuture()->addCallback([call](c10::ivalue::Future& done) {
      Call::arrived(call, done.hasError() ? done.tryRetrieveErrorMessage() : "");
    });
    return call;
  }

  void check(const at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK(output.scalar_type() == input.scalar_type() && input.numel() == output.numel() * size_, "pccl: reduce_scatter of ",
                input.numel(), " ", input.scalar_type(), ", expected ", size_, " times ", output.numel(), " ", output.scalar_type(),
                " of the output");
  }

  // The program for so many bytes, or none where the inner backend is `allowed` and better; Python decides, makes it and
  // the links that it needs when it is asked for first.
  std::shared_ptr<const Program> programme(Collective collective, size_t bytes, int root, bool allowed = false) {
    core_->engine.check_process();  // before links are made in its name
    {
      std::lock_guard lock(order_);
      auto found = programs_.find({collective, bytes, root, allowed});
      if (found != programs_.end()) return found->second;
    }
    py::gil_scoped_acquire locked;
    auto made = (*plan_)(static_cast<int>(collective), bytes, root, allowed).cast<std::shared_ptr<Program>>();
    std::lock_guard lock(order_);
    return programs_[{collective, bytes, root, allowed}] = made;
  }

  std::shared_ptr<Core> core_;
  uint64_t key_, sequence_ = 0;
  double timeout_;
  std::shared_ptr<py::object> plan_;
  std::mutex order_;
  std::map<std::tuple<Collective, size_t, int, bool>, std::shared_ptr<const Program>> programs_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init([](int size, int rank, int chunks, int work_slots, uint32_t digest, const std::vector<int32_t>& ops,
                       const std::vector<int32_t>& spans, const std::vector<int32_t>& after) {
        return std::make_shared<Program>(Program::parse(size, rank, chunks, work_slots, digest, ops, spans, after));
      }));
  py::class_<Core, std::shared_ptr<Core>>(module, "Core")
      // Never destroyed: its threads may need the interpreter, which may be gone by then, and a forked child has none of them.
      .def(py::init([] { return std::shared_ptr<Core>(new Core, [](Core*) {}); }))
      .def("close", [](Core& core) { core.finisher->close(); }, py::call_guard<py::gil_scoped_release>())
      .def("linked", [](Core& core, int peer) { return core.engine.linked(peer); })
      .def("add_outgoing", [](Core& core, int peer, int socket, int process) { core.engine.add_outgoing(peer, socket, process); })
      .def("add_incoming", [](Core& core, int peer, int socket, int process) { core.engine.add_incoming(peer, socket, process); })
      .def("add_group", [](Core& core, uint64_t key, std::vector<int> peers, std::vector<int> ranks, int rank, double timeout) {
        core.engine.add_group(key, std::move(peers), std::move(ranks), rank, timeout);
      });
  module.def("backend", [](std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout,
                           const BackendPointer& inner, py::object plan) -> BackendPointer {
    return c10::make_intrusive<Shim>(std::move(core), key, rank, size, timeout, inner, std::move(plan));
  });
  module.def("planner", [](const BackendPointer& backend) { return dynamic_cast<Planned&>(*backend).planner(); });
  module.def("forget", [](const BackendPointer& backend) { dynamic_cast<Planned&>(*backend).forget(); });
  define_device(module);
}

}  // namespace pccl
