// The backend for tensors that are on an accelerator, in front of the vendor's. Nothing here is compiled for an accelerator: torch's
// generic streams and events are enough.
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "overlap.hpp"
#include "reduce.hpp"
#include "schedule.hpp"

namespace pccl {
namespace {

using c10d::Work;

// Work that was put on a stream in full before the call returned; on the CPU it is done then.
class Enqueued : public Work {
 public:
  Enqueued(int rank, c10d::OpType kind, Tensors outputs, std::optional<c10::Stream> stream)
      : Work(rank, kind), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices;
    if (stream) {
      devices.push_back(stream->device());
      done_.emplace(stream->device_type());
      done_->record(*stream);
    }
    future_ = c10::make_intrusive<at::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(c10::IValue(outputs_));  // after what is on the current stream, which is `stream`
  }

  bool isCompleted() override { return !done_ || done_->query(); }
  bool isSuccess() const override { return true; }
  // Whoever asks goes on after it: on an accelerator the caller's stream waits, not the caller.
  bool wait(std::chrono::milliseconds) override {
    future_->waitAndThrow();
    return true;
  }
  void synchronize() override { future_->waitAndThrow(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void abort() override {}

 private:
  Tensors outputs_;
  std::optional<c10::Event> done_;
  c10::intrusive_ptr<at::ivalue::Future> future_;
};

// All-gathers, reduce-scatters and all-reduces of a device's tensors, where a Python object chooses so, which is asked once for a size:
//   ours(collective, bytes of all blocks, whether the inner backend can do it) -> bool
//   route(collective, elements of all blocks, bytes of one, whether the node's backend can sum them) -> Route
//   local: the backend of the node's ranks, or None
//   shutdown(abort)
class Device : public Delegate, public Planned {
 public:
  Device(int rank, int size, BackendPointer inner, py::object executor, c10::DeviceType type)
      : Delegate(rank, size, std::move(inner)), executor_(kept(std::move(executor))), type_(type) {}

  void startCoalescing() override {
    inner_->startCoalescing();
    grouped_ = true;
  }
  WorkPointer endCoalescing() override {
    grouped_ = false;
    return inner_->endCoalescing();
  }
  void shutdown() override {
    end(false);
    inner_->shutdown();
  }
  void abort() override {
    end(true);
    inner_->abort();
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (!ours(Collective::kAllReduce, tensors, 1, &options.reduceOp)) return inner_->allreduce(tensors, options);
    return run(c10d::OpType::ALLREDUCE, Collective::kAllReduce, tensors, tensors, tensors, options.reduceOp);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (!ours(Collective::kAllReduce, tensors, 1, &options.reduceOp)) return inner_->allreduce_coalesced(tensors, options);
    return run(c10d::OpType::ALLREDUCE_COALESCED, Collective::kAllReduce, tensors, tensors, tensors, options.reduceOp);
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!ours(Collective::kAllGather, {input}, size_)) return inner_->_allgather_base(output, input, options);
    check("all_gather", "input", input, "output", output);
    return run(c10d::OpType::_ALLGATHER_BASE, Collective::kAllGather, {output}, {output}, {input});
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (outputs.size() != inputs.size() || !ours(Collective::kAllGather, inputs, size_))
      return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
    for (size_t i = 0; i < inputs.size(); ++i) check("all_gather", "input", inputs[i], "output", outputs[i]);
    return run(c10d::OpType::COALESCED, Collective::kAllGather, outputs, outputs, inputs);
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (inputs.size() != 1 || outputs.size() != 1 || !alike(outputs[0], inputs[0]) || !ours(Collective::kAllGather, inputs, size_))
      return inner_->allgather(outputs, inputs, options);
    return run(c10d::OpType::ALLGATHER, Collective::kAllGather, outputs[0], outputs[0], inputs);
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (!ours(Collective::kReduceScatter, {output}, size_, &options.reduceOp)) return inner_->_reduce_scatter_base(output, input, options);
    check("reduce_scatter", "output", output, "input", input);
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, Collective::kReduceScatter, {output}, {output}, {input}, options.reduceOp);
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    if (outputs.size() != inputs.size() || !ours(Collective::kReduceScatter, outputs, size_, &options.reduceOp))
      return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
    for (size_t i = 0; i < inputs.size(); ++i) check("reduce_scatter", "output", outputs[i], "input", inputs[i]);
    return run(c10d::OpType::COALESCED, Collective::kReduceScatter, outputs, outputs, inputs, options.reduceOp);
  }
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    if (outputs.size() != 1 || inputs.size() != 1 || !alike(inputs[0], outputs[0]) ||
        !ours(Collective::kReduceScatter, outputs, size_, &options.reduceOp))
      return inner_->reduce_scatter(outputs, inputs, options);
    return run(c10d::OpType::REDUCE_SCATTER, Collective::kReduceScatter, outputs, outputs, inputs[0], options.reduceOp);
  }

  py::object planner() const override { return *executor_; }
  void forget() override {
    std::lock_guard lock(mutex_);
    chosen_.clear();
    routes_.clear();
  }

 private:
  bool knows(const at::Tensor& tensor) const {
    return tensor.device().type() == type_ && tensor.layout() == at::kStrided && type_of(tensor);
  }
  // Shapes do not count: they may be other ones on other ranks, which must choose alike.
  bool alike(const Tensors& parts, const at::Tensor& one) const {
    if (parts.size() != static_cast<size_t>(size_)) return false;
    for (const auto& part : parts)
      if (!knows(part) || part.numel() != one.numel() || part.scalar_type() != one.scalar_type()) return false;
    return true;
  }
  void check(const char* collective, const char* one, const at::Tensor& own, const char* all, const at::Tensor& whole) const {
    TORCH_CHECK(own.scalar_type() == whole.scalar_type() && whole.numel() == own.numel() * size_ && own.device() == whole.device(),
                "pccl: ", collective, " has ", whole.numel(), " ", whole.scalar_type(), " of the ", all, ", expected ", size_, " times ",
                own.numel(), " ", own.scalar_type(), " of the ", one);
  }

  // Whether we do it rather than the inner backend, which knows neither sums of bool nor int16, and has all of a group of
  // calls. All ranks answer alike: this depends on what the call must have in common on them. `times`: how often a tensor's bytes go into all blocks.
  bool ours(Collective collective, const Tensors& tensors, int times, const c10d::ReduceOp* op = nullptr) {
    if (tensors.empty() || grouped_) return false;
    size_t bytes = 0;
    bool native = true;
    for (const auto& tensor : tensors) {
      if (!knows(tensor) || tensor.device() != tensors[0].device()) return false;
      if (op && (reduction_of(*op).value_or(Reduction::kNone) > Reduction::kAverage || (*op == c10d::ReduceOp::AVG && !tensor.is_floating_point()))) return false;
      native = native && tensor.scalar_type() != at::kShort && !(op && tensor.scalar_type() == at::kBool);
      bytes += tensor.nbytes() * times;
    }
    std::tuple key{collective, bytes, native};
    {
      std::lock_guard lock(mutex_);
      auto found = chosen_.find(key);
      if (found != chosen_.end()) return found->second;
    }
    bool answer = asked([&](py::object& executor) {
      return executor.attr("ours")(static_cast<int>(collective), bytes, native).cast<bool>();
    });
    std::lock_guard lock(mutex_);
    return chosen_[key] = answer;
  }

  WorkPointer run(c10d::OpType kind, Collective collective, const Tensors& result, const Tensors& outputs, const Tensors& inputs,
                  const c10d::ReduceOp& op = c10d::ReduceOp::SUM) {
    at::NoGradGuard no_grad;
    c10::OptionalStreamGuard guard;
    std::optional<c10::Stream> side;
    if (type_ != c10::DeviceType::CPU) {
      side = begin(outputs[0].device(), outputs, inputs);
      guard.reset_stream(*side);
    }
    // As many outputs as inputs are calls of their own; else one side is a list of blocks.
    if (outputs.size() == inputs.size()) {
      for (size_t i = 0; i < outputs.size(); ++i) enqueue(collective, outputs[i], inputs[i], op);
    } else if (outputs.size() == 1) {
      Tensors flat;
      for (const auto& part : inputs) flat.push_back(part.reshape(-1));
      enqueue(collective, outputs[0], at::cat(flat), op);
    } else {
      at::Tensor whole = outputs[0].new_empty({size_ * outputs[0].numel()});
      enqueue(collective, whole, inputs[0], op);
      Tensors rows;
      for (size_t i = 0; i < outputs.size(); ++i)
        rows.push_back(whole.narrow(0, static_cast<int64_t>(i) * outputs[0].numel(), outputs[0].numel()).view(outputs[i].sizes()));
      at::_foreach_copy_(outputs, rows);
    }
    return c10::make_intrusive<Enqueued>(rank_, kind, result, side);
  }

  // One collective, on the current stream: an all-gather's output is p blocks, a reduce-scatter's one; an all-reduce is in place.
  void enqueue(Collective collective, const at::Tensor& output, const at::Tensor& input, Operator op) {
    auto flat = [](const at::Tensor& data) { return data.as_strided({data.numel()}, {1}); };
    bool copied = !output.is_contiguous();
    at::Tensor into = copied ? output.new_empty({output.numel()}) : flat(output);
    if (copied && collective == Collective::kAllReduce) into.copy_(output.reshape(-1));
    at::Tensor from = collective == Collective::kAllReduce ? into : apart(collective, rank_, flat(input.contiguous()), into);
    bool averages = collective != Collective::kAllGather && op == c10d::ReduceOp::AVG;
    double divisor = size_;
    if (averages && into.scalar_type() == at::kHalf) {  // whose sum may be too large
      double ahead = halved(size_);
      from = collective == Collective::kAllReduce ? from.div_(ahead) : from.div(ahead);
      divisor /= ahead;
    }
    const at::Tensor& whole = collective == Collective::kReduceScatter ? from : into;
    if (whole.numel()) {
      connect(whole.device());
      route(collective, whole)->run(into, from, op);
    }
    if (averages) into.div_(divisor);
    if (copied) output.copy_(into.view(output.sizes()));
  }

  std::shared_ptr<Route> route(Collective collective, const at::Tensor& whole) {
    std::tuple key{collective, whole.numel(), whole.scalar_type()};
    {
      std::lock_guard lock(mutex_);
      auto found = routes_.find(key);
      if (found != routes_.end()) return found->second;
    }
    bool sums = collective == Collective::kAllGather || whole.scalar_type() != at::kBool;
    std::shared_ptr<Route> made;
    asked([&](py::object& executor) {
      py::object answer = executor.attr("route")(static_cast<int>(collective), whole.numel(), whole.itemsize(), sums && whole.scalar_type() != at::kShort);
      made = answer.cast<std::shared_ptr<Route>>();
      return true;
    });
    std::lock_guard lock(mutex_);
    if (routes_.size() >= kRoutes) routes_.clear();
    return routes_[key] = made;
  }

  // NCCL's communicators are made by all ranks together, of which a step may leave some out.
  void connect(c10::Device device) {
    auto connected = [&] {
      std::lock_guard lock(mutex_);
      return connected_.contains(device.index());
    };
    if (connected()) return;
    Unlocked unlocked;
    std::lock_guard alone(connecting_);
    if (connected()) return;
    std::vector<BackendPointer> backends{inner_};
    asked([&](py::object& executor) {
      py::object local = executor.attr("local");
      if (!local.is_none()) backends.push_back(local.cast<BackendPointer>());
      return true;
    });
    for (const auto& backend : backends) {
      Tensors one{at::zeros({1}, at::TensorOptions(device))};
      backend->allreduce(one, {})->wait();
    }
    std::lock_guard lock(mutex_);
    connected_.insert(device.index());
  }

  // The group's own stream on a device, which goes on from where the caller's is.
  c10::Stream begin(c10::Device device, const Tensors& outputs, const Tensors& inputs) {
    c10::impl::VirtualGuardImpl streams(type_);
    std::unique_lock lock(mutex_);
    auto found = streams_.find(device.index());
    if (found == streams_.end()) found = streams_.emplace(device.index(), streams.getStreamFromGlobalPool(device, false)).first;
    c10::Stream side = found->second;
    lock.unlock();
    c10::Event ready(type_);
    ready.record(streams.getStream(device));
    ready.block(side);
    for (const Tensors* tensors : {&outputs, &inputs})
      for (const auto& tensor : *tensors) tensor.record_stream(side);
    return side;
  }

  void end(bool abort) {
    asked([&](py::object& executor) {
      executor.attr("shutdown")(abort);
      return true;
    });
  }

  // Calls Python; what it raises becomes an error that needs no interpreter's lock, for callers that have it not.
  template <class Call>
  bool asked(const Call& call) {
    py::gil_scoped_acquire locked;
    try {
      return call(*executor_);
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  }

  static constexpr size_t kRoutes = 1024;  // where sizes are always new, as tokens of experts'

  std::shared_ptr<py::object> executor_;
  c10::DeviceType type_;
  bool grouped_ = false;
  std::mutex connecting_, mutex_;  // taken in this order
  std::map<std::tuple<Collective, int64_t, at::ScalarType>, std::shared_ptr<Route>> routes_;
  std::set<c10::DeviceIndex> connected_;
  std::map<std::tuple<Collective, size_t, bool>, bool> chosen_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace

void define_device(py::module_& module) {
  define_schedule(module);
  module.def("device_backend", [](const BackendPointer& inner, int rank, int size, py::object executor,
                                  const std::string& type) -> BackendPointer {
    return c10::make_intrusive<Device>(rank, size, inner, std::move(executor), c10::Device(type).type());
  });
}

}  // namespace pccl
