// The torch.distributed backend "pccl": collectives by the engine, all else by an inner backend.
#include <climits>
#include <map>
#include <mutex>

#include "calls.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

constexpr auto kNone = c10d::ReduceOp::SUM;  // of what adds nothing up

class Shim : public Delegate, public Planned {
 public:
  Shim(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout,
       BackendPointer inner, py::object plan)
      : Delegate(rank, size, std::move(inner)), core_(std::move(core)), key_(key), timeout_(timeout), plan_(kept(std::move(plan))) {
    core_->engine.attend(key_, hooks());
  }
  ~Shim() override { end("destroyed its process group"); }

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = static_cast<double>(timeout.count()) / 1000; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void shutdown() override {
    end("shut its process group down");
    inner_->shutdown();
  }
  void abort() override {
    end("aborted its process group");
    inner_->abort();
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() != 1 || !knows(tensors[0], options.reduceOp))
      return left(c10d::OpType::ALLREDUCE, Collective::kAllReduce, tensors, options.reduceOp, [&] { return inner_->allreduce(tensors, options); });
    if (!native(Collective::kAllReduce, tensors[0], options.reduceOp)) return reduced(tensors, options);
    return leave(c10d::OpType::ALLREDUCE, tensors[0], tensors[0], ticket(Collective::kAllReduce, tensors[0], options.reduceOp),
                 [&](at::Tensor& data, at::Tensor&) {
                   Tensors one{data};
                   return inner_->allreduce(one, options);
                 });
  }

  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (const auto& tensor : tensors)
      if (!knows(tensor, options.reduceOp))
        return left(c10d::OpType::ALLREDUCE_COALESCED, Collective::kAllReduce, tensors, options.reduceOp,
                    [&] { return inner_->allreduce_coalesced(tensors, options); });
    return reduced(tensors, options);
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!knows(input))
      return left(c10d::OpType::_ALLGATHER_BASE, Collective::kAllGather, {output}, kNone, [&] { return inner_->_allgather_base(output, input, options); });
    if (native(Collective::kAllGather, output))
      return leave(c10d::OpType::_ALLGATHER_BASE, output, input, ticket(Collective::kAllGather, output, kNone),
                   [&](at::Tensor& to, at::Tensor& from) { return inner_->_allgather_base(to, from, options); });
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "pccl: all_gather of ", inputs.size(), " inputs into ", outputs.size(), " outputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!knows(inputs[i]))
        return left(c10d::OpType::ALLGATHER_COALESCED, Collective::kAllGather, outputs, kNone,
                    [&] { return inner_->allgather_into_tensor_coalesced(outputs, inputs, options); });
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
      return left(c10d::OpType::ALLGATHER, Collective::kAllGather, outputs.empty() ? inputs : outputs[0], kNone,
                  [&] { return inner_->allgather(outputs, inputs, options); });
    auto call = make(c10d::OpType::ALLGATHER, outputs[0], 1);
    gather(call, joined(*call, outputs[0], true), inputs[0], options);
    return call;
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (!knows(input, options.reduceOp))
      return left(c10d::OpType::_REDUCE_SCATTER_BASE, Collective::kReduceScatter, {input}, options.reduceOp,
                  [&] { return inner_->_reduce_scatter_base(output, input, options); });
    check(output, input);
    if (native(Collective::kReduceScatter, input, options.reduceOp)) return summed(output, input, options);
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "pccl: reduce_scatter of ", inputs.size(), " inputs into ", outputs.size(), " outputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!knows(inputs[i], options.reduceOp))
        return left(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, Collective::kReduceScatter, inputs, options.reduceOp,
                    [&] { return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options); });
      check(outputs[i], inputs[i]);
    }
    auto call = make(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) scatter(call, outputs[i], inputs[i], options);
    return call;
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    if (outputs.size() != 1 || inputs.size() != 1 || !knows(outputs[0], options.reduceOp) || !alike(inputs[0], outputs[0]))
      return left(c10d::OpType::REDUCE_SCATTER, Collective::kReduceScatter, inputs.empty() ? outputs : inputs[0], options.reduceOp,
                  [&] { return inner_->reduce_scatter(outputs, inputs, options); });
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
    if (tensors.size() != 1 || !knows(tensors[0]))
      return left(c10d::OpType::BROADCAST, Collective::kBroadcast, tensors, kNone, [&] { return inner_->broadcast(tensors, options); },
                  options.rootRank);
    const at::Tensor& tensor = tensors[0];
    auto call = make(c10d::OpType::BROADCAST, tensors, 1);
    at::Tensor flat = tensor.contiguous();
    if (!flat.is_same(tensor) && options.rootRank != rank_) call->copy_back(tensor, flat);
    run(call, {Collective::kBroadcast, *type_of(tensor), Reduction::kNone, static_cast<uint64_t>(flat.numel())}, flat, flat,
        options.timeout, options.asyncOp, static_cast<int>(options.rootRank));
    return call;
  }

  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return left(c10d::OpType::_ALLREDUCE_SPARSE, Collective::kAllReduce, tensors, options.reduceOp,
                [&] { return inner_->allreduce_sparse(tensors, options); });
  }
  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return left(c10d::OpType::ALLGATHER_COALESCED, Collective::kAllGather, inputs, kNone,
                [&] { return inner_->allgather_coalesced(outputs, inputs, options); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return left(c10d::OpType::REDUCE, Collective::kReduce, tensors, options.reduceOp, [&] { return inner_->reduce(tensors, options); },
                options.rootRank);
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return left(c10d::OpType::GATHER, Collective::kGather, inputs, kNone, [&] { return inner_->gather(outputs, inputs, options); },
                options.rootRank);
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return left(c10d::OpType::SCATTER, Collective::kScatter, outputs, kNone, [&] { return inner_->scatter(outputs, inputs, options); },
                options.rootRank);
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override {
    return left(c10d::OpType::ALLTOALL_BASE, Collective::kAllToAll, {input}, kNone,
                [&] { return inner_->alltoall_base(output, input, output_sizes, input_sizes, options); });
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return left(c10d::OpType::ALLTOALL, Collective::kAllToAll, inputs, kNone, [&] { return inner_->alltoall(outputs, inputs, options); });
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override {
    return passed(c10d::OpType::SEND, "send", tensors, to, [&] { return inner_->send(tensors, to, tag); });
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    return passed(c10d::OpType::RECV, "recv", tensors, from, [&] { return inner_->recv(tensors, from, tag); });
  }
  WorkPointer recvAnysource(Tensors& tensors, int tag) override {
    return passed(c10d::OpType::RECVANYSOURCE, "recv", tensors, -1, [&] { return inner_->recvAnysource(tensors, tag); });
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

  // Of a call that is left to the inner backend: its number, and what is said where it fails.
  std::shared_ptr<Ticket> ticket(Collective collective, const at::Tensor& data, const c10d::ReduceOp& op, int64_t root = 0) {
    core_->engine.check_process();
    std::string why = core_->engine.broken(key_);
    if (!why.empty()) throw std::runtime_error("pccl: " + why);
    bool sums = collective == Collective::kAllReduce || collective == Collective::kReduceScatter || collective == Collective::kReduce;
    Signature signature{collective, data.defined() ? type_of(data).value_or(Type::kOther) : Type::kOther,
                        sums ? reduction_of(op).value_or(Reduction::kNone) : Reduction::kNone,
                        data.defined() ? static_cast<uint64_t>(data.numel()) : 0, static_cast<uint32_t>(root)};
    auto made = std::make_shared<Ticket>(core_, key_, plan_, signature.text());
    std::lock_guard lock(order_);
    made->sequence = ++sequence_;
    made->watch = core_->engine.leave(key_, made->sequence, signature);
    return made;
  }

  // What `inner()` does, if it is on the CPU numbered and watched.
  template <class Inner>
  WorkPointer left(c10d::OpType kind, Collective collective, const Tensors& data, const c10d::ReduceOp& op, const Inner& inner, int64_t root = 0) {
    if (!data.empty() && !data[0].is_cpu()) return inner();
    auto known = ticket(collective, data.empty() ? at::Tensor() : data[0], op, root);
    return begun(kind, known, inner);
  }

  // What has ended gloo's connections may be seen before it takes a call.
  template <class Inner>
  static WorkPointer begun(c10d::OpType kind, const std::shared_ptr<Ticket>& known, const Inner& inner) {
    try {
      return c10::make_intrusive<Left>(kind, inner(), known);
    } catch (const std::exception& error) {
      if (known->watch) known->watch->over = true;
      if (!Ticket::final(error.what())) throw;
      throw std::runtime_error("pccl: " + known->fail(error.what()));
    }
  }

  template <class Inner>
  WorkPointer passed(c10d::OpType kind, const char* name, const Tensors& data, int peer, const Inner& inner) {
    if (data.empty() || !data[0].is_cpu()) return inner();
    std::string why = core_->engine.broken(key_);
    if (!why.empty()) throw std::runtime_error("pccl: " + why);
    std::string what = std::string(name) + " of " + std::to_string(data[0].numel()) + " " + type_name(type_of(data[0]).value_or(Type::kOther));
    return begun(kind, std::make_shared<Ticket>(core_, key_, plan_, what, peer), inner);
  }

  // What `inner(output, input)` does, on copies where this rank's tensors have gaps.
  template <class Inner>
  WorkPointer leave(c10d::OpType kind, at::Tensor& output, at::Tensor& input, const std::shared_ptr<Ticket>& known, const Inner& inner) {
    if (output.is_contiguous() && input.is_contiguous()) return c10::make_intrusive<Left>(kind, inner(output, input), known);
    auto call = make(kind, {output}, 1);
    at::Tensor from = input.contiguous(), to = output.is_same(input) ? from : landing(*call, output);
    if (to.is_same(from)) call->copy_back(output, from);
    call->hold(from);
    call->hold(to);
    return after(inner(to, from), call, known);
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
    auto known = ticket(Collective::kReduceScatter, input, options.reduceOp);
    return after(inner_->allreduce(sums, asked), call, known);
  }

  // A call that is done when the inner backend's work is.
  WorkPointer after(const WorkPointer& work, const CallPointer& call, const std::shared_ptr<Ticket>& known) {
    work->getFuture()->addCallback([call](c10::ivalue::Future& done) {
      Call::arrived(call, done.hasError() ? done.tryRetrieveErrorMessage() : "");
    });
    return c10::make_intrusive<Left>(call->retrieveOpType(), call, known);
  }

  void end(const char* what) {
    std::lock_guard lock(order_);
    core_->engine.remove_group(key_, what, sequence_);
  }

  Hooks hooks() {
    auto finisher = core_->finisher;
    c10::weak_intrusive_ptr<c10d::Backend> weak(inner_);
    // The engine's thread must not be the one that lets it go.
    auto reach = [finisher, plan = std::weak_ptr(plan_)](int peer, bool needed) {
      finisher->post([plan, peer, needed] {
        auto asked = plan.lock();
        if (!asked) return;
        py::gil_scoped_acquire locked;
        asked->attr("reach")(peer, needed);
      });
    };
    auto broken = [finisher, weak, rank = rank_, size = size_] {
      finisher->post([weak, rank, size] {
        if (auto inner = weak.lock()) cut(*inner, rank, size);
      });
    };
    return {reach, broken};
  }

  // Ends what is under way in the inner backend, which has no call for that; but where a receive's time is over gloo closes all
  // connections of the group.
  static void cut(c10d::Backend& inner, int rank, int size) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      Tensors nothing{at::empty({1}, at::kByte)};
      try {
        inner.recv(nothing, peer, INT_MAX)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
      }
    }
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
    auto made = (*plan_)(static_cast<int>(collective), bytes, root, allowed, sequence_ + 1).cast<std::shared_ptr<Program>>();
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
