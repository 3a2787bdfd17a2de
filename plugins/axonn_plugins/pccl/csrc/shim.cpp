// The torch.distributed backend "pccl" for the CPU's tensors: collectives by schedules.
#include <torch/version.h>

#include "exchanges.hpp"

namespace pccl {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using Factor = c10d::NCCLPreMulSumSupplement;
#else
using Factor = c10d::PreMulSumSupplement;
#endif

class Shim : public Exchanges {
 public:
  using Exchanges::Exchanges;

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
    one("all_reduce", tensors);
    return reduced(tensors, options);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduced(tensors, options);
  }

  // Is done when it returns: how much each rank has must be known before it can be asked for.
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    require(tensors.size() == 1 && tensors[0].is_sparse() && tensors[0].device().is_cpu() && is(options.reduceOp, c10d::ReduceOp::SUM),
            "all_reduce of sparse tensors is possible for one on the CPU and its sum only; make it dense");
    at::NoGradGuard no_grad;
    at::Tensor mine = tensors[0].coalesce(), counts = at::empty({size_}, at::kLong), count = at::full({1}, mine._nnz(), at::kLong);
    c10d::AllgatherOptions asked;
    asked.timeout = options.timeout;
    _allgather_base(counts, count, asked)->wait();
    auto all = [&](const at::Tensor& own) {  // whose first dimension is as long as its rank's count
      Tensors parts, input{own.contiguous()};
      std::vector<int64_t> sizes = own.sizes().vec();
      for (int rank = 0; rank < size_; ++rank) {
        sizes[0] = counts[rank].item<int64_t>();
        parts.push_back(at::empty(sizes, own.options()));
      }
      std::vector<Tensors> outputs{parts};
      allgather(outputs, input, asked)->wait();
      return at::cat(parts);
    };
    at::Tensor where = all(mine.indices().t()).t(), what = all(mine.values());
    tensors[0].copy_(at::sparse_coo_tensor(where, what, mine.sizes()).coalesce());
    auto call = make(c10d::OpType::_ALLREDUCE_SPARSE, tensors);
    Call::arrived(call, "");
    return call;
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    at::Tensor tensor = real(one("reduce", tensors), options.reduceOp);
    Reduction how = summing("reduce", tensor, options.reduceOp);
    int root = static_cast<int>(options.rootRank);
    require(root >= 0 && root < size_, "reduce to rank ", root, " is not possible; name one of ", size_, " ranks");
    auto call = make(c10d::OpType::REDUCE, tensors);
    at::Tensor from = weighted(tensor.contiguous(), options.reduceOp);
    // All but the root keep what they have.
    at::Tensor to = rank_ == root ? landing(*call, tensor) : at::empty(tensor.sizes(), tensor.options());
    run(call, signature(Collective::kReduce, tensor, tensor.numel(), how), Collective::kReduce, from, to, options.timeout, options.asyncOp, root);
    return call;
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    require(outputs.size() == inputs.size(), "all_gather of ", inputs.size(), " inputs into ", outputs.size(),
            " outputs is not possible; give as many of both");
    for (size_t i = 0; i < inputs.size(); ++i) {
      require_cpu("all_gather", inputs[i]);
      require_cpu("all_gather", outputs[i]);
      require(outputs[i].scalar_type() == inputs[i].scalar_type() && outputs[i].numel() == inputs[i].numel() * size_, "all_gather into ",
              outputs[i].numel(), " ", outputs[i].scalar_type(), ", expected ", size_, " times ", inputs[i].numel(), " ", inputs[i].scalar_type(),
              " of the input");
    }
    auto call = make(c10d::OpType::_ALLGATHER_BASE, outputs, inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) gather_all(call, landing(*call, outputs[i]), inputs[i], options);
    if (inputs.empty()) Call::arrived(call, "");
    return call;
  }

  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const at::Tensor& input = one("all_gather", inputs);
    require(outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_), "all_gather into ",
            outputs.empty() ? 0 : outputs[0].size(), " tensors is not possible; pass one for each of ", size_, " ranks");
    if (!alike(outputs[0])) return gather_parts(outputs[0], input, options);
    require(outputs[0][0].numel() == input.numel() && outputs[0][0].scalar_type() == input.scalar_type(), "all_gather of ", input.numel(), " ",
            input.scalar_type(), " into parts of ", outputs[0][0].numel(), " ", outputs[0][0].scalar_type(), " is not possible; give both the same");
    auto call = make(c10d::OpType::ALLGATHER, outputs[0]);
    at::Tensor whole = joined(*call, outputs[0], true);
    // As NCCL's, which torch's communication hooks go by: one tensor, whose rows are the ranks' parts.
    std::vector<int64_t> rows = outputs[0][0].sizes().vec();
    rows.insert(rows.begin(), size_);
    call->promise(whole.view(rows));
    gather_all(call, whole, input, options);
    return call;
  }

  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    require(outputs.size() == static_cast<size_t>(size_), "all_gather_coalesced into ", outputs.size(), " lists is not possible; pass one for each of ",
            size_, " ranks");
    for (const Tensors& list : outputs)
      require(list.size() == inputs.size(), "all_gather_coalesced of ", inputs.size(), " tensors into a list of ", list.size(),
              " is not possible; give as many of both");
    auto call = make(c10d::OpType::ALLGATHER_COALESCED, outputs.empty() ? Tensors{} : outputs[0], inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors parts;
      for (const Tensors& list : outputs) parts.push_back(list[i]);
      require_cpu("all_gather_coalesced", inputs[i]);
      require(alike(parts) && parts[0].numel() == inputs[i].numel() && parts[0].scalar_type() == inputs[i].scalar_type(),
              "all_gather_coalesced of ", inputs[i].numel(), " ", inputs[i].scalar_type(), " into tensors that are not like it is not possible");
      gather_all(call, joined(*call, parts, true), inputs[i], options);
    }
    if (inputs.empty()) Call::arrived(call, "");
    return call;
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    require(outputs.size() == inputs.size(), "reduce_scatter of ", inputs.size(), " inputs into ", outputs.size(),
            " outputs is not possible; give as many of both");
    for (size_t i = 0; i < inputs.size(); ++i) {
      require_cpu("reduce_scatter", inputs[i]);
      require_cpu("reduce_scatter", outputs[i]);
      require(outputs[i].scalar_type() == inputs[i].scalar_type() && inputs[i].numel() == outputs[i].numel() * size_, "reduce_scatter of ",
              inputs[i].numel(), " ", inputs[i].scalar_type(), ", expected ", size_, " times ", outputs[i].numel(), " ", outputs[i].scalar_type(),
              " of the output");
      summing("reduce_scatter", real(inputs[i], options.reduceOp), options.reduceOp);
    }
    auto call = make(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      scatter_sums(call, real(outputs[i], options.reduceOp), real(inputs[i], options.reduceOp).contiguous(), options);
    if (inputs.empty()) Call::arrived(call, "");
    return call;
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    at::Tensor output = real(one("reduce_scatter", outputs), options.reduceOp);
    require(inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_), "reduce_scatter of ", inputs.empty() ? 0 : inputs[0].size(),
            " tensors is not possible; pass one for each of ", size_, " ranks");
    Reduction how = summing("reduce_scatter", output, options.reduceOp);
    Tensors parts;
    for (const auto& part : inputs[0]) {
      require_cpu("reduce_scatter", part);
      parts.push_back(real(part, options.reduceOp));
    }
    auto call = make(c10d::OpType::REDUCE_SCATTER, outputs);
    if (alike(parts)) {
      require(parts[0].numel() == output.numel() && parts[0].scalar_type() == output.scalar_type(), "reduce_scatter of parts of ", parts[0].numel(), " ",
              parts[0].scalar_type(), " into ", output.numel(), " ", output.scalar_type(), " is not possible; give both the same");
      scatter_sums(call, output, joined(*call, parts, false), options);
      return call;
    }
    for (auto& part : parts) part = weighted(part, options.reduceOp);
    return scatter_parts(call, output, parts, how, options);
  }

  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    auto token = at::zeros({1}, at::kByte);
    auto call = make(c10d::OpType::BARRIER, {});
    Call::follow(call);
    run(call, {Collective::kBarrier, Type::kU8, Reduction::kMax, 1}, Collective::kBarrier, token, token, options.timeout, options.asyncOp);
    return call;
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = one("broadcast", tensors);
    int root = static_cast<int>(options.rootRank);
    require(root >= 0 && root < size_, "broadcast from rank ", root, " is not possible; name one of ", size_, " ranks");
    auto call = make(c10d::OpType::BROADCAST, tensors);
    at::Tensor flat = tensor.contiguous();
    if (!flat.is_same(tensor) && root != rank_) call->copy_back(tensor, flat);
    run(call, signature(Collective::kBroadcast, tensor, wire_elements(tensor)), Collective::kBroadcast, flat, flat, options.timeout, options.asyncOp,
        root);
    return call;
  }

 private:
  static Signature signature(Collective collective, const at::Tensor& like, uint64_t elements, Reduction reduction = Reduction::kNone) {
    return {collective, wire_type_of(like), reduction, elements};
  }

  // Whether a list's tensors are as long as each other. All ranks answer alike, unless their lists do not match.
  static bool alike(const Tensors& parts) {
    return std::ranges::all_of(parts, [&](const at::Tensor& part) {
      return part.device().is_cpu() && part.layout() == at::kStrided && part.numel() == parts[0].numel() && part.scalar_type() == parts[0].scalar_type();
    });
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

  static bool is(const c10d::ReduceOp& op, c10d::ReduceOp::RedOpType kind) { return static_cast<c10d::ReduceOp::RedOpType>(op) == kind; }
  // Complex numbers are added up as pairs of real ones.
  static at::Tensor real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    bool adds = is(op, c10d::ReduceOp::SUM) || is(op, c10d::ReduceOp::AVG);
    return tensor.is_complex() && adds ? at::view_as_real(tensor) : tensor;
  }
  Reduction summing(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
    bool weighs = is(op, c10d::ReduceOp::PREMUL_SUM) && at::isFloatingType(tensor.scalar_type()) && op.supplement_;
    Reduction found = reduction(name, tensor, weighs ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op);
    return weighs ? Reduction::kWeighted : found;
  }
  // Times the factor of a sum that has one; for an average of float16, whose sum may be too large for it, a power of two.
  at::Tensor weighted(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    if (is(op, c10d::ReduceOp::AVG) && tensor.scalar_type() == at::kHalf) {
      at::NoGradGuard no_grad;
      return at::div(tensor, static_cast<double>(halved(size_)));
    }
    if (!is(op, c10d::ReduceOp::PREMUL_SUM)) return tensor;
    const auto& by = static_cast<const Factor&>(*op.supplement_);
    at::NoGradGuard no_grad;
    return by.tensor_factor.defined() ? at::mul(tensor, by.tensor_factor.to(tensor.scalar_type())) : at::mul(tensor, by.double_factor);
  }

  WorkPointer reduced(Tensors& tensors, const c10d::AllreduceOptions& options) {
    for (const auto& tensor : tensors) {
      require_cpu("all_reduce", tensor);
      summing("all_reduce", real(tensor, options.reduceOp), options.reduceOp);
    }
    auto call = make(c10d::OpType::ALLREDUCE, tensors, tensors.size());
    for (const auto& each : tensors) {
      at::Tensor tensor = real(each, options.reduceOp), flat = tensor.contiguous();
      if (!flat.is_same(tensor)) call->copy_back(tensor, flat);
      run(call, signature(Collective::kAllReduce, tensor, tensor.numel(), summing("all_reduce", tensor, options.reduceOp)), Collective::kAllReduce,
          weighted(flat, options.reduceOp), flat, options.timeout, options.asyncOp);
    }
    if (tensors.empty()) Call::arrived(call, "");
    return call;
  }

  // `output` is contiguous.
  void gather_all(const CallPointer& call, const at::Tensor& output, const at::Tensor& input, const c10d::AllgatherOptions& options) {
    run(call, signature(Collective::kAllGather, input, wire_elements(output)), Collective::kAllGather, input.contiguous(), output, options.timeout,
        options.asyncOp);
  }
  // `input` is contiguous.
  void scatter_sums(const CallPointer& call, const at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& options) {
    run(call, signature(Collective::kReduceScatter, input, input.numel(), summing("reduce_scatter", input, options.reduceOp)),
        Collective::kReduceScatter, weighted(input, options.reduceOp), landing(*call, output), options.timeout, options.asyncOp);
  }
};

}  // namespace

BackendPointer make_shim(std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout, py::object plan) {
  return c10::make_intrusive<Shim>(std::move(core), key, rank, size, timeout, std::move(plan));
}

}  // namespace pccl
