// What torch's backends of ours have in common: the types they know, and leaving calls to another backend.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <memory>
#include <optional>
#include <vector>

#include "frame.hpp"

namespace pccl {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using BackendPointer = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

inline std::optional<Type> type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return Type::kF64;
    case at::kFloat: return Type::kF32;
    case at::kBFloat16: return Type::kBF16;
    case at::kHalf: return Type::kF16;
    case at::kLong: return Type::kI64;
    case at::kInt: return Type::kI32;
    case at::kShort: return Type::kI16;
    case at::kChar: return Type::kI8;
    case at::kByte: return Type::kU8;
    case at::kBool: return Type::kBool;
    default: return std::nullopt;
  }
}

// Every type has one for what only moves bytes.
inline Type wire_type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kUInt16: return Type::kU16;
    case at::kUInt32: return Type::kU32;
    case at::kUInt64: return Type::kU64;
    case at::kComplexDouble: return Type::kC128;
    case at::kComplexFloat: return Type::kC64;
    case at::kComplexHalf: return Type::kC32;
    case at::kFloat8_e4m3fn: return Type::kF8E4M3;
    case at::kFloat8_e4m3fnuz: return Type::kF8E4M3Z;
    case at::kFloat8_e5m2: return Type::kF8E5M2;
    case at::kFloat8_e5m2fnuz: return Type::kF8E5M2Z;
    case at::kFloat8_e8m0fnu: return Type::kF8E8M0;
    default: return type_of(tensor).value_or(Type::kOther);
  }
}

// Elements of that type.
inline uint64_t wire_elements(const at::Tensor& tensor) {
  return wire_type_of(tensor) == Type::kOther ? tensor.nbytes() : static_cast<uint64_t>(tensor.numel());
}

inline std::optional<Reduction> reduction_of(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return Reduction::kSum;
    case c10d::ReduceOp::MIN: return Reduction::kMin;
    case c10d::ReduceOp::MAX: return Reduction::kMax;
    case c10d::ReduceOp::PRODUCT: return Reduction::kProduct;
    case c10d::ReduceOp::AVG: return Reduction::kAverage;
    case c10d::ReduceOp::BAND: return Reduction::kAnd;
    case c10d::ReduceOp::BOR: return Reduction::kOr;
    case c10d::ReduceOp::BXOR: return Reduction::kXor;
    default: return std::nullopt;
  }
}

// A Python object that may be let go by a thread without the interpreter's lock.
inline std::shared_ptr<py::object> kept(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            py::gil_scoped_acquire locked;
            delete held;
          }};
}

// This thread is without the interpreter's lock, as is due where it may wait for another that needs it.
class Unlocked {
 public:
  Unlocked() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// A backend that tells how it plans collectives.
class Planned {
 public:
  virtual ~Planned() = default;
  virtual py::object planner() const = 0;
  // What was planned is asked for anew.
  virtual void forget() = 0;
};

// Leaves every call to an inner backend.
class Delegate : public c10d::Backend {
 public:
  Delegate(int rank, int size, BackendPointer inner) : Backend(rank, size), inner_(std::move(inner)) {}

  const BackendPointer& inner() const { return inner_; }

  const std::string getBackendName() const override { return "pccl"; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 10
  void setGroupUid(const std::string& name) override {
    Backend::setGroupUid(name);
    inner_->setGroupUid(name);
  }
#endif
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  void startCoalescing() override { inner_->startCoalescing(); }
  WorkPointer endCoalescing() override { return inner_->endCoalescing(); }
  void shutdown() override { inner_->shutdown(); }
  void abort() override { inner_->abort(); }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override { return of(tensors).allreduce(tensors, options); }
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override { return of(tensors).allreduce_sparse(tensors, options); }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override { return of(tensors).allreduce_coalesced(tensors, options); }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override { return of(tensors).reduce(tensors, options); }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override { return of(tensors).broadcast(tensors, options); }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return of({input})._allgather_base(output, input, options);
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override { return of(inputs).allgather(outputs, inputs, options); }
  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return of(inputs).allgather_coalesced(outputs, inputs, options);
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return of(inputs).allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return of({input})._reduce_scatter_base(output, input, options);
  }
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return of(outputs).reduce_scatter(outputs, inputs, options);
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return of(outputs).reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override { return of(inputs).gather(outputs, inputs, options); }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override { return of(outputs).scatter(outputs, inputs, options); }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override {
    return of({input}).alltoall_base(output, input, output_sizes, input_sizes, options);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override { return of(inputs).alltoall(outputs, inputs, options); }
  WorkPointer send(Tensors& tensors, int to, int tag) override { return of(tensors).send(tensors, to, tag); }
  WorkPointer recv(Tensors& tensors, int from, int tag) override { return of(tensors).recv(tensors, from, tag); }
  WorkPointer recvAnysource(Tensors& tensors, int tag) override { return of(tensors).recvAnysource(tensors, tag); }
  WorkPointer barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool all) override { inner_->monitoredBarrier(options, all); }

 protected:
  // The backend that a call on these tensors is left to.
  virtual c10d::Backend& of(const Tensors&) { return *inner_; }

  BackendPointer inner_;
};

void define_device(py::module_& module);
void define_router(py::module_& module);

}  // namespace pccl
