// Calls in which every message goes straight to where it belongs: between two ranks, to or from a root, from all to all, and
// lists whose parts have other lengths.
#pragma once

#include <numeric>
#include <utility>

#include "caller.hpp"

namespace pccl {

class Exchanges : public Caller {
 public:
  using Caller::Caller;

  WorkPointer send(Tensors& tensors, int to, int tag) override {
    return pass(c10d::OpType::SEND, tensors, to < 0 ? size_ : to, tag);
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    return pass(c10d::OpType::RECV, tensors, from < 0 ? size_ : from, tag);
  }
  WorkPointer recvAnysource(Tensors& tensors, int tag) override {
    return pass(c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
  }

  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const at::Tensor& mine = one("gather", inputs);
    int root = root_of("gather", options.rootRank);
    Tensors none;
    const Tensors& parts = parts_of("gather", root, outputs, none);
    if (rank_ == root) require_same("gather", "output", parts[rank_], "input", mine);
    auto call = make(c10d::OpType::GATHER, parts);
    run(call, signature(Collective::kGather, mine, {mine}, root), pccl::gather(size_, rank_, root), {mine.contiguous()}, landings(*call, parts, mine),
        options.timeout, options.asyncOp);
    return call;
  }

  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const at::Tensor& mine = one("scatter", outputs);
    int root = root_of("scatter", options.rootRank);
    Tensors none;
    const Tensors& parts = parts_of("scatter", root, inputs, none);
    if (rank_ == root) require_same("scatter", "input", parts[rank_], "output", mine);
    auto call = make(c10d::OpType::SCATTER, outputs);
    run(call, signature(Collective::kScatter, mine, {mine}, root), pccl::scatter(size_, rank_, root), flats("scatter", parts, mine),
        {landing(*call, mine)}, options.timeout, options.asyncOp);
    return call;
  }

  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override {
    require_cpu("all_to_all", input);
    require_cpu("all_to_all", output);
    auto call = make(c10d::OpType::ALLTOALL_BASE, {output});
    at::Tensor from = input.contiguous(), to = landing(*call, output);
    return exchange(call, split("output", to, output_sizes), split("input", from, input_sizes), options);
  }

  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    size_t size = static_cast<size_t>(size_);
    require(outputs.size() == size && inputs.size() == size, "all_to_all of ", inputs.size(), " tensors into ", outputs.size(),
            " is not possible; pass one of each for each of ", size_, " ranks");
    auto call = make(c10d::OpType::ALLTOALL, outputs);
    return exchange(call, landings(*call, outputs, inputs[0]), flats("all_to_all", inputs, inputs[0]), options);
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool) override {
    auto call = make(c10d::OpType::BARRIER, {});
    double most = seconds(options.timeout);
    // Rank 0 knows who is missing, and tells the others.
    auto timeout = std::chrono::milliseconds(static_cast<int64_t>((rank_ == 0 ? most : most + kTelling) * 1000));
    run(call, {Collective::kBarrier, Type::kU8, Reduction::kNone, 0, kRollCall}, roll_call(size_, rank_), {}, {}, timeout, true);
    static_cast<c10d::Work&>(*call).wait();
  }

 protected:
  // A list of all ranks' tensors, which need not be alike.
  WorkPointer gather_parts(const Tensors& outputs, const at::Tensor& input, const c10d::AllgatherOptions& options) {
    require_same("all_gather", "output", outputs[rank_], "input", input);
    auto call = make(c10d::OpType::ALLGATHER, outputs);
    run(call, signature(Collective::kAllGatherParts, input, {input}), all_gather_parts(size_, rank_), {input.contiguous()},
        landings(*call, outputs, input), options.timeout, options.asyncOp);
    return call;
  }
  // Sums of such a list; all tensors are real.
  WorkPointer scatter_parts(CallPointer call, const at::Tensor& output, const Tensors& inputs, Reduction reduction,
                            const c10d::ReduceScatterOptions& options) {
    require_same("reduce_scatter", "input", inputs[rank_], "output", output);
    Signature what = signature(Collective::kReduceScatterParts, output, {output});
    what.reduction = reduction;
    run(call, what, reduce_scatter_parts(size_, rank_), flats("reduce_scatter", inputs, output), {landing(*call, output)}, options.timeout,
        options.asyncOp);
    return call;
  }

  Tensors landings(Call& call, const Tensors& outputs, const at::Tensor& like) {
    Tensors made;
    for (const auto& output : outputs) {
      require_type(output, like);
      made.push_back(landing(call, output));
    }
    return made;
  }
  Tensors flats(const char* name, const Tensors& inputs, const at::Tensor& like) {
    Tensors made;
    for (const auto& input : inputs) {
      require_cpu(name, input);
      require_type(input, like);
      made.push_back(input.contiguous());
    }
    return made;
  }

 private:
  static constexpr double kTelling = 5;  // seconds
  static constexpr uint32_t kRollCall = 1;

  static Signature signature(Collective collective, const at::Tensor& like, const Tensors& sent, int root = 0) {
    uint64_t elements = 0;
    for (const auto& tensor : sent) elements += wire_elements(tensor);
    return {collective, wire_type_of(like), Reduction::kNone, elements, static_cast<uint32_t>(root)};
  }

  int root_of(const char* name, int64_t root) {
    require(root >= 0 && root < size_, name, " with root ", root, " is not possible; name one of ", size_, " ranks");
    return static_cast<int>(root);
  }
  // The root's list, which the other ranks have not.
  const Tensors& parts_of(const char* name, int root, const std::vector<Tensors>& lists, const Tensors& none) {
    if (rank_ != root) {
      bool empty = lists.empty() || (lists.size() == 1 && lists[0].empty());
      require(empty, name, " with a list of tensors on a rank other than its root ", root, " is not possible; leave it out there");
      return none;
    }
    size_t got = lists.size() == 1 ? lists[0].size() : lists.size();
    require(lists.size() == 1 && got == static_cast<size_t>(size_), name, " with a list of ", got, " tensors on the root is not possible; pass one for each of ",
            size_, " ranks");
    return lists[0];
  }
  void require_type(const at::Tensor& tensor, const at::Tensor& like) {
    require_cpu("a list", tensor);
    require(tensor.scalar_type() == like.scalar_type(), "tensors of ", tensor.scalar_type(), " and ", like.scalar_type(),
            " in one call are not possible; give all the same type");
  }
  void require_same(const char* name, const char* one, const at::Tensor& mine, const char* other, const at::Tensor& theirs) {
    require(mine.numel() == theirs.numel() && mine.scalar_type() == theirs.scalar_type(), name, " with ", mine.numel(), " ", mine.scalar_type(),
            " for this rank in the ", one, " and ", theirs.numel(), " ", theirs.scalar_type(), " in the ", other, " is not possible; give both the same");
  }

  // Rows of a contiguous tensor for each rank, as views.
  Tensors split(const char* name, const at::Tensor& flat, const std::vector<int64_t>& sizes) {
    int64_t rows = flat.dim() ? flat.size(0) : flat.numel();
    std::vector<int64_t> each = sizes;
    if (sizes.empty()) {
      require(rows % size_ == 0, "all_to_all of an ", name, " of ", rows, " rows is not possible without sizes, as ", size_, " ranks do not divide it");
      each.assign(static_cast<size_t>(size_), rows / size_);
    }
    bool negative = std::ranges::any_of(each, [](int64_t size) { return size < 0; });
    require(!negative && each.size() == static_cast<size_t>(size_) && std::accumulate(each.begin(), each.end(), int64_t{0}) == rows,
            "all_to_all with ", name, " sizes ", each, " of ", rows, " rows is not possible; give ", size_, " sizes that add up to them");
    at::Tensor table = flat.dim() ? flat : flat.reshape({rows});
    Tensors made;
    int64_t first = 0;
    for (int64_t size : each) {
      made.push_back(table.narrow(0, first, size));
      first += size;
    }
    return made;
  }

  WorkPointer exchange(const CallPointer& call, const Tensors& outputs, const Tensors& inputs, const c10d::AllToAllOptions& options) {
    require_type(outputs[0], inputs[0]);
    require_same("all_to_all", "output", outputs[rank_], "input", inputs[rank_]);
    run(call, signature(Collective::kAllToAll, inputs[0], inputs), pccl::all_to_all(size_, rank_), inputs, outputs, options.timeout, options.asyncOp);
    return call;
  }
};

}  // namespace pccl
