// The torch.distributed backend "pccl": collectives by the engine, all else by an inner backend.
#include <map>
#include <mutex>

#include "calls.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

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
    check(output, input);
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
    if (!able || programme(collective, whole.nbytes(), 0, true)) return false;
    Reduction reduction = collective == Collective::kAllGather ? Reduction::kNone : *reduction_of(op);
    std::lock_guard lock(order_);
    core_->engine.leave(key_, ++sequence_, {collective, *type_of(whole), reduction, static_cast<uint64_t>(whole.numel())});
    return true;
  }

  // What `inner(output, input)` does, on copies where this rank's tensors have gaps.
  template <class Inner>
  WorkPointer leave(c10d::OpType kind, at::Tensor& output, at::Tensor& input, const Inner& inner) {
    if (output.is_contiguous() && input.is_contiguous()) return c10::make_intrusive<Left>(kind, inner(output, input), core_, key_);
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
    auto call = make(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, 1);
    Tensors sums{input.clone(at::MemoryFormat::Contiguous)};
    call->copy_back(output, sums[0].view({-1}).narrow(0, rank_ * output.numel(), output.numel()).view(output.sizes()));
    c10d::AllreduceOptions asked;
    asked.reduceOp = options.reduceOp;
    asked.timeout = options.timeout;
    return after(inner_->allreduce(sums, asked), call);
  }

  // A call that is done when the inner backend's work is.
  WorkPointer after(const WorkPointer& work, const CallPointer& call) {
    work->getFuture()->addCallback([call](c10::ivalue::Future& done) {
      Call::arrived(call, done.hasError() ? done.tryRetrieveErrorMessage() : "");
    });
    return c10::make_intrusive<Left>(call->retrieveOpType(), call, core_, key_);
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

BackendPointer make_shim(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout, BackendPointer inner, py::object plan) {
  return c10::make_intrusive<Shim>(std::move(core), key, rank, size, timeout, std::move(inner), std::move(plan));
}

}  // namespace pccl
