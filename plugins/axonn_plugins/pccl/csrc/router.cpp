// A group's one backend for all devices, which sends each tensor to its device's.
#include <mutex>
#include <utility>

#include "delegate.hpp"

namespace pccl {
namespace {

using c10d::Work;

// All of some works.
class Joined : public Work {
 public:
  explicit Joined(std::vector<WorkPointer> works) : works_(std::move(works)) {}
  bool isCompleted() override {
    for (const auto& work : works_)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }

 private:
  std::vector<WorkPointer> works_;
};

// torch gives a group one custom backend for all devices: this one leaves the CPU's tensors to the inner backend, and others
// to one that is made when the first such tensor comes.
class Router : public Delegate {
 public:
  Router(int rank, int size, BackendPointer inner, py::object make) : Delegate(rank, size, std::move(inner)), make_(kept(std::move(make))) {}

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPointer endCoalescing() override {
    coalescing_ = false;
    std::vector<WorkPointer> works = std::exchange(works_, {});
    if (std::exchange(begun_, false)) works.push_back(made()->endCoalescing());
    return c10::make_intrusive<Joined>(std::move(works));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
    std::lock_guard lock(mutex_);
    timeout_ = timeout;
    if (device_) device_->setTimeout(timeout);
  }
#endif
  void shutdown() override {
    inner_->shutdown();
    if (auto device = made()) device->shutdown();
  }
  void abort() override {
    inner_->abort();
    if (auto device = made()) device->abort();
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool all) override { inner_->monitoredBarrier(options, all); }
  WorkPointer send(Tensors& tensors, int to, int tag) override { return taken(tensors, Delegate::send(tensors, to, tag)); }
  WorkPointer recv(Tensors& tensors, int from, int tag) override { return taken(tensors, Delegate::recv(tensors, from, tag)); }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return taken(tensors, Delegate::allreduce_coalesced(tensors, options));
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return taken(inputs, Delegate::allgather_into_tensor_coalesced(outputs, inputs, options));
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return taken(outputs, Delegate::reduce_scatter_tensor_coalesced(outputs, inputs, options));
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    return options.device && !options.device->is_cpu() ? device()->barrier(options) : inner_->barrier(options);
  }

  // Made once, whichever threads call first: every member makes as many.
  BackendPointer device() {
    if (auto device = made()) return device;
    Unlocked unlocked;
    std::lock_guard alone(making_);
    if (auto device = made()) return device;
    BackendPointer device;
    {
      py::gil_scoped_acquire locked;
      try {
        device = (*make_)().cast<BackendPointer>();
      } catch (const py::error_already_set& error) {
        throw std::runtime_error(error.what());
      }
    }
    device->setGroupUid(getGroupUid());
    std::lock_guard lock(mutex_);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
    if (timeout_) device->setTimeout(*timeout_);
#endif
    return device_ = device;
  }

 private:
  c10d::Backend& of(const Tensors& tensors) override {
    if (tensors.empty() || tensors[0].is_cpu()) return *inner_;
    c10d::Backend& found = *device();  // which the router keeps
    if (coalescing_ && !begun_) {
      found.startCoalescing();
      begun_ = true;
    }
    return found;
  }
  // Null where there is none yet.
  BackendPointer made() {
    std::lock_guard lock(mutex_);
    return device_;
  }
  // What the CPU's backend, which knows no groups of calls, does at once belongs to the group all the same.
  WorkPointer taken(const Tensors& tensors, WorkPointer work) {
    if (coalescing_ && !tensors.empty() && tensors[0].is_cpu()) works_.push_back(work);
    return work;
  }

  std::shared_ptr<py::object> make_;
  std::mutex making_, mutex_;  // taken in this order; the second guards what follows
  BackendPointer device_;
  std::optional<std::chrono::milliseconds> timeout_;  // that was set since the group was made
  bool coalescing_ = false, begun_ = false;
  std::vector<WorkPointer> works_;
};

}  // namespace

void define_router(py::module_& module) {
  // A group's backend for an accelerator's tensors, given what torch has for that device.
  module.def("on_device", [](const BackendPointer& backend) -> BackendPointer {
    if (dynamic_cast<Planned*>(backend.get())) return backend;
    auto* router = dynamic_cast<Router*>(backend.get());
    TORCH_CHECK(router, "pccl: the group's backend ", backend->getBackendName(), " has nothing of pccl's for an accelerator");
    return router->device();
  });
  module.def("router", [](const BackendPointer& inner, int rank, int size, py::object make) -> BackendPointer {
    return c10::make_intrusive<Router>(rank, size, inner, std::move(make));
  });
}

}  // namespace pccl
