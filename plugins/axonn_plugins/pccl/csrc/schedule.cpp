#include "schedule.hpp"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <functional>
#include <map>

namespace pccl {
namespace {

enum Kind { kSend, kRecv, kReduce, kCopy };

// One call's memory: flat tensors of one type on one device.
class Memory {
 public:
  Memory(const at::Tensor& input, const at::Tensor& output, int64_t work) : buffers_{input, output, output.new_empty({work})} {}

  at::Tensor view(const Region& region) const { return buffers_.at(region[0]).narrow(0, region[1], region[2]); }
  Tensors views(const Regions& regions) const {
    Tensors found;
    for (const auto& region : regions) found.push_back(view(region));
    return found;
  }
  // The regions one after the other: a view where it is one, else a copy.
  at::Tensor take(const Regions& regions) const { return regions.size() == 1 ? view(regions[0]) : at::cat(views(regions)); }
  void put(const Regions& regions, const at::Tensor& data) const {
    Tensors to = views(regions);
    if (to.size() == 1) {
      if (to[0].data_ptr() != data.data_ptr()) to[0].copy_(data);
      return;
    }
    std::vector<int64_t> lengths;
    for (const auto& region : regions) lengths.push_back(region[2]);
    at::_foreach_copy_(to, data.split_with_sizes(lengths));
  }
  at::Tensor empty(int64_t length) const { return buffers_[1].new_empty({length}); }

 private:
  std::array<at::Tensor, 3> buffers_;
};

// Calls of a backend as one group, for which the current stream (on the CPU: the caller) waits.
void grouped(c10d::Backend& backend, const std::vector<std::function<WorkPointer()>>& calls) {
  if (calls.empty()) return;
  std::vector<WorkPointer> works;
  bool together = backend.supportsCoalescing();
  if (together) backend.startCoalescing();
  try {
    for (const auto& call : calls) works.push_back(call());
  } catch (...) {
    if (together) backend.endCoalescing();  // else later calls would belong to the group, which nobody ends
    throw;
  }
  if (together) works = {backend.endCoalescing()};
  for (const auto& work : works) work->wait();
}

void combine(Operator op, const at::Tensor& left, const at::Tensor& right, at::Tensor out) {
  switch (op) {
    case c10d::ReduceOp::PRODUCT: at::mul_out(out, left, right); return;
    case c10d::ReduceOp::MIN: at::minimum_out(out, left, right); return;
    case c10d::ReduceOp::MAX: at::maximum_out(out, left, right); return;
    default: at::add_out(out, left, right);  // an average is divided at the end
  }
}

// dst = src (+) data, the lower rank's on the left: even max(-0, 0) has the same bits on both sides then.
void reduce(const Transfer& message, const at::Tensor& data, const Memory& memory, Operator op) {
  at::Tensor mine = memory.take(message.src);
  at::Tensor out = message.dst.size() == 1 ? memory.view(message.dst[0]) : data;
  combine(op, message.first ? mine : data, message.first ? data : mine, out);
  if (message.dst.size() > 1) memory.put(message.dst, data);
}

Transfer read(const Schedule::Row& row) {
  return std::apply([](auto&&... value) { return Transfer{value...}; }, row);
}

}  // namespace

Schedule::Schedule(BackendPointer inner, const Rows& steps, int64_t work) : inner_(std::move(inner)), work_(work) {
  for (const auto& [messages, locals] : steps) {
    Step& step = steps_.emplace_back();
    for (const auto& row : messages) step.messages.push_back(read(row));
    for (const auto& row : locals) step.locals.push_back(read(row));
  }
}

void Schedule::run(const at::Tensor& input, const at::Tensor& output, Operator op) const {
  Memory memory(input, output, work_);
  std::map<int, at::Tensor> kept;  // what was received to be added, by its number
  for (const Step& step : steps_) {
    std::vector<std::function<WorkPointer()>> receives, sends;
    Tensors arrived;
    for (const Transfer& message : step.messages) {
      bool sent = message.kind == kSend, whole = message.kind == kRecv && message.dst.size() == 1;
      at::Tensor data = sent ? memory.take(message.src) : whole ? memory.view(message.dst[0]) : memory.empty(message.length);
      arrived.push_back(data);
      // As bytes.
      auto call = [this, sent, peer = message.peer, bytes = Tensors{data.view(at::kByte)}]() mutable {
        return sent ? inner_->send(bytes, peer, 0) : inner_->recv(bytes, peer, 0);
      };
      (sent ? sends : receives).push_back(call);
    }
    receives.insert(receives.end(), sends.begin(), sends.end());
    grouped(*inner_, receives);
    for (size_t i = 0; i < arrived.size(); ++i) {
      const Transfer& message = step.messages[i];
      if (message.kind == kReduce) kept[message.number] = arrived[i];
      else if (message.kind == kRecv && message.dst.size() > 1) memory.put(message.dst, arrived[i]);
    }
    for (const Transfer& local : step.locals) {
      if (local.kind == kReduce) reduce(local, kept.extract(local.number).mapped(), memory, op);
      else memory.put(local.dst, memory.take(local.src));
    }
  }
}

void Route::run(const at::Tensor& output, const at::Tensor& input, Operator op) const {
  if (window_) {
    through_window(output, input, op);
  } else if (!within_) {
    schedule_.run(input, output, op);
  } else if (collective_ == Collective::kAllGather) {
    // Between nodes, each lane's blocks to their places; then within the node, row by row, in place.
    schedule_.run(input, output, op);
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    for (const auto& row : rows(output)) pairs.emplace_back(row, row.narrow(0, within_->lane * input.numel(), input.numel()));
    gather(pairs);
  } else if (collective_ == Collective::kReduceScatter) {
    // Within the node row by row, then each lane's sums between nodes.
    int64_t length = output.numel();
    at::Tensor sums = input.new_empty({static_cast<int64_t>(within_->firsts.size()) * length});
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    for (const auto& row : rows(input)) pairs.emplace_back(sums.narrow(0, static_cast<int64_t>(pairs.size()) * length, length), row);
    scatter(pairs, op);
    schedule_.run(sums, output, op);
  } else {
    all_reduce(output, op);
  }
}

// Each of a node's ranks gets a share of the node's sums, which is summed between nodes and gathered again.
void Route::all_reduce(const at::Tensor& data, Operator op) const {
  int64_t length = (data.numel() + within_->width - 1) / within_->width;
  at::Tensor whole = data;
  bool padded = length * within_->width != data.numel();
  if (padded) {
    whole = data.new_zeros({length * within_->width});
    whole.narrow(0, 0, data.numel()).copy_(data);
  }
  at::Tensor share = data.new_empty({length});
  scatter({{share, whole}}, op);
  schedule_.run(share, share, op);
  gather({{whole, share}});
  if (padded) data.copy_(whole.narrow(0, 0, data.numel()));
}

// Copied in, done by the library, copied out.
void Route::through_window(const at::Tensor& output, const at::Tensor& input, Operator op) const {
  Operator sum = op == c10d::ReduceOp::AVG ? c10d::ReduceOp::SUM : op;  // divided at the very end
  auto room = [&](int64_t at, const at::Tensor& like) { return window_->narrow(0, at, like.nbytes()).view(like.scalar_type()); };
  at::Tensor from = room(0, input).copy_(input), to = room(window_->numel() / 2, output);
  WorkPointer work;
  if (collective_ == Collective::kAllGather) {
    work = inner_->_allgather_base(to, from, {});
  } else if (collective_ == Collective::kReduceScatter) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = sum;
    work = inner_->_reduce_scatter_base(to, from, options);
  } else {
    c10d::AllreduceOptions options;
    options.reduceOp = sum;
    Tensors one{to = from};
    work = inner_->allreduce(one, options);
  }
  work->wait();
  output.copy_(to);
}

void Route::gather(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs) const {
  std::vector<std::function<WorkPointer()>> calls;
  for (const auto& [whole, own] : pairs)
    calls.push_back([this, whole = whole, own = own]() mutable { return within_->local->_allgather_base(whole, own, {}); });
  grouped(*within_->local, calls);
}

void Route::scatter(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs, Operator op) const {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op == c10d::ReduceOp::AVG ? c10d::ReduceOp::SUM : op;  // divided at the very end
  std::vector<std::function<WorkPointer()>> calls;
  for (const auto& [own, whole] : pairs)
    calls.push_back([this, options, own = own, whole = whole]() mutable { return within_->local->_reduce_scatter_base(own, whole, options); });
  grouped(*within_->local, calls);
}

// The blocks of each node.
std::vector<at::Tensor> Route::rows(const at::Tensor& whole) const {
  int64_t length = whole.numel() / (static_cast<int64_t>(within_->firsts.size()) * within_->width);
  Tensors found;
  for (int64_t first : within_->firsts) found.push_back(whole.narrow(0, first * length, within_->width * length));
  return found;
}

void define_schedule(py::module_& module) {
  using Nodes = std::tuple<BackendPointer, int64_t, int64_t, std::vector<int64_t>>;
  py::class_<Route, std::shared_ptr<Route>>(module, "Route")
      .def(py::init([](int collective, const BackendPointer& inner, const Schedule::Rows& steps, int64_t work, std::optional<Nodes> nodes,
                       std::optional<at::Tensor> window) {
        std::optional<Within> within;
        if (nodes) within = std::apply([](auto&&... value) { return Within{value...}; }, *nodes);
        return std::make_shared<Route>(static_cast<Collective>(collective), inner, Schedule(inner, steps, work), std::move(within), std::move(window));
      }));
}

}  // namespace pccl
