// A group of ranks with NCCL's rules: one communicator with one stream, on which calls are done in the order in which they were
// posted, whatever they are; the same calls in the same order on all ranks; contiguous tensors of the device alone; a message
// lets neither side go on until both have come to it; a result is there for the stream that has waited for it, and no other.
// Bytes travel by gloo. A group may be split from it, as torch has NCCL do where the world was told its device: that is a call of all
// of its ranks, also of those that the new group lacks, at the same place of their order, and holds up the host until all have come.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <optional>
#include <thread>

#include "late.hpp"

namespace late {
namespace {

using Tensors = std::vector<at::Tensor>;
using Pointer = c10::intrusive_ptr<c10d::Work>;
using c10d::Backend;
using Call = std::function<std::vector<Pointer>(Backend&)>;

constexpr int kData = 0, kReceived = 1;

at::Tensor host_view(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.options().device(at::kCPU));
}
Tensors host_view(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(host_view(tensor));
  return made;
}

// One call, or a group of calls.
struct Posted {
  std::vector<Call> calls;
  std::string said;      // what all ranks must post alike; nothing for messages
  Tensors kept;          // alive until somebody has waited
  std::function<void()> then = [] {};
  bool done = false;
  std::exception_ptr error;
};

class Communicator : public Backend {
 public:
  Communicator(int rank, int size, c10::intrusive_ptr<Backend> inner, c10::intrusive_ptr<c10d::Store> store)
      : Backend(rank, size), inner_(std::move(inner)), store_(std::move(store)), line_(line_of(Tracker::get().make_stream())) {
    worker_ = std::thread([this] { work(); });
  }
  ~Communicator() override { shutdown(); }

  const std::string getBackendName() const override { return "late"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { shutdown(); }
  void shutdown() override {
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(closed_, true)) return;
    }
    changed_.notify_all();
    worker_.join();
  }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("late"); }
  // Of the ranks, in the order in which they are here; nothing for those that are not among them. Its name may be another on each.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>&) override {
    part();
    auto found = std::find(ranks.begin(), ranks.end(), rank_);
    if (found == ranks.end()) return {};
    std::string place = "split" + std::to_string(parts_) + " " + std::to_string(ranks[0]);
    c10::intrusive_ptr<c10d::Store> below = c10::make_intrusive<c10d::PrefixStore>(place, store_);
    py::gil_scoped_acquire locked;
    return maker()(below, found - ranks.begin(), ranks.size()).cast<c10::intrusive_ptr<Backend>>();
  }
  void part() {
    auto posted = std::make_shared<Posted>();
    posted->said = "split;";
    posted->calls.push_back([](Backend& gloo) { return std::vector{gloo.barrier(c10d::BarrierOptions())}; });
    push(posted);
    finish(*posted);
    ++parts_;
  }
  // Makes a communicator of a store, a rank and a size.
  static py::object& maker() {
    static auto* made = new py::object();
    return *made;
  }

  void startCoalescing() override { group_.emplace(std::make_shared<Posted>()); }
  Pointer endCoalescing() override {
    auto posted = *std::exchange(group_, std::nullopt);
    return push(posted);
  }

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return post("broadcast from " + std::to_string(options.rootRank), options.rootRank == rank_ ? tensors : Tensors{},
                options.rootRank == rank_ ? Tensors{} : tensors,
                [data = host_view(tensors), options](Backend& gloo) mutable { return std::vector{gloo.broadcast(data, options)}; });
  }
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override { return sums("all_reduce", tensors, options); }
  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return sums("all_reduce", tensors, options);
  }
  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    c10d::ReduceOptions summed = options;
    auto share = divisor(summed.reduceOp);
    return post("reduce to " + std::to_string(options.rootRank), {}, tensors, [data = host_view(tensors), summed](Backend& gloo) mutable {
      return std::vector{gloo.reduce(data, summed)};
    }, divided(tensors, share));
  }
  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(output.numel() == input.numel() * size_, "all_gather_into_tensor of ", input.numel(), " into ", output.numel());
    return gathers({output}, {input}, options);
  }
  Pointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gathers(outputs, inputs, options);
  }
  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> rooms;
    for (const auto& each : outputs) rooms.push_back(host_view(each));
    return post("all_gather", inputs, outputs.at(0), [rooms, own = host_view(inputs), options](Backend& gloo) mutable {
      return std::vector{gloo.allgather(rooms, own, options)};
    });
  }
  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> rooms;
    for (const auto& each : outputs) rooms.push_back(host_view(each));
    return post("gather to " + std::to_string(options.rootRank), inputs, outputs.empty() ? Tensors{} : outputs[0],
                [rooms, own = host_view(inputs), options](Backend& gloo) mutable { return std::vector{gloo.gather(rooms, own, options)}; },
                [] {}, false);
  }
  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.numel() == output.numel() * size_, "reduce_scatter_tensor of ", input.numel(), " into ", output.numel());
    return scatters({output}, {input}, options);
  }
  Pointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return scatters(outputs, inputs, options);
  }
  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    c10d::ReduceScatterOptions summed = options;
    auto share = divisor(summed.reduceOp);
    std::vector<Tensors> parts;
    for (const auto& each : inputs) parts.push_back(host_view(each));
    return post("reduce_scatter", inputs.at(0), outputs, [parts, room = host_view(outputs), summed](Backend& gloo) mutable {
      return std::vector{gloo.reduce_scatter(room, parts, summed)};
    }, divided(outputs, share));
  }
  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    return post("all_to_all", {input}, {output},
                [to = host_view(output), from = host_view(input), output_sizes, input_sizes, options](Backend& gloo) mutable {
                  return std::vector{gloo.alltoall_base(to, from, output_sizes, input_sizes, options)};
                }, [] {}, false);
  }
  Pointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return post("all_to_all", inputs, outputs, [to = host_view(outputs), from = host_view(inputs), rank = rank_](Backend& gloo) mutable {
      std::vector<Pointer> works;
      for (size_t peer = 0; peer < to.size(); ++peer) {
        if (static_cast<int>(peer) == rank) {
          to[peer].copy_(from[peer]);
          continue;
        }
        Tensors sent{from[peer]}, got{to[peer]};
        works.push_back(gloo.send(sent, static_cast<int>(peer), kReceived + 1));
        works.push_back(gloo.recv(got, static_cast<int>(peer), kReceived + 1));
      }
      return works;
    }, [] {}, false);
  }
  Pointer send(Tensors& tensors, int peer, int) override {
    return post("", tensors, {}, [data = host_view(tensors), peer, answer = at::empty(1, at::kByte)](Backend& gloo) mutable {
      Tensors answers{answer};
      return std::vector{gloo.send(data, peer, kData), gloo.recv(answers, peer, kReceived)};
    });
  }
  Pointer recv(Tensors& tensors, int peer, int) override {
    return post("", {}, tensors, [data = host_view(tensors), peer, answer = at::zeros(1, at::kByte)](Backend& gloo) mutable {
      Tensors answers{answer};
      return std::vector{gloo.recv(data, peer, kData), gloo.send(answers, peer, kReceived)};
    });
  }
  Pointer barrier(const c10d::BarrierOptions& options) override {
    TORCH_CHECK(!options.device || options.device->is_cuda(), "a barrier of the device's group is on the device");
    return post("barrier", {}, {}, [](Backend& gloo) { return std::vector{gloo.barrier(c10d::BarrierOptions())}; });
  }

 private:
  class Enqueued : public c10d::Work {
   public:
    Enqueued(c10::intrusive_ptr<Communicator> owner, std::shared_ptr<Posted> posted, Clock end)
        : owner_(std::move(owner)), posted_(std::move(posted)), end_(std::move(end)) {}
    // Never when it is first asked; later, the host knows that it is done.
    bool isCompleted() override {
      std::lock_guard lock(owner_->mutex_);
      if (!posted_->done || !std::exchange(asked_, true)) return false;
      Tracker::get().wait(kHost, end_);
      return true;
    }
    bool isSuccess() const override { return !posted_->error; }
    bool wait(std::chrono::milliseconds) override {
      owner_->finish(*posted_);
      Tracker::get().wait(line_of(current), end_);
      posted_->kept.clear();
      return true;
    }
    void synchronize() override { wait({}); }
    void blockCurrentStream() override { wait({}); }

   private:
    c10::intrusive_ptr<Communicator> owner_;
    std::shared_ptr<Posted> posted_;
    Clock end_;
    bool asked_ = false;
  };

  // The call is done, whatever streams know of it.
  void finish(const Posted& posted) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return posted.done; });
    if (posted.error) std::rethrow_exception(posted.error);
  }

  static std::optional<int> divisor(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return std::nullopt;
    op = c10d::ReduceOp::SUM;
    return 1;
  }
  std::function<void()> divided(const Tensors& tensors, std::optional<int> average) {
    if (!average) return [] {};
    return [data = host_view(tensors), size = size_]() mutable {
      for (auto& tensor : data) tensor.div_(size);
    };
  }
  template <class Options>
  Pointer sums(const char* what, Tensors& tensors, const Options& options) {
    c10d::AllreduceOptions summed;
    summed.reduceOp = options.reduceOp;
    auto share = divisor(summed.reduceOp);
    return post(what, {}, tensors, [data = host_view(tensors), summed](Backend& gloo) {
      std::vector<Pointer> works;
      for (const auto& each : data) {
        Tensors one{each};
        works.push_back(gloo.allreduce(one, summed));
      }
      return works;
    }, divided(tensors, share));
  }
  Pointer gathers(const Tensors& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
    return post("all_gather", inputs, outputs, [to = host_view(outputs), from = host_view(inputs), options](Backend& gloo) mutable {
      std::vector<Pointer> works;
      for (size_t i = 0; i < to.size(); ++i) {
        at::Tensor own = from[i].clone().view(-1), whole = to[i].view(-1);  // in place, NCCL's gather takes what lies in the result
        works.push_back(gloo._allgather_base(whole, own, options));
      }
      return works;
    });
  }
  Pointer scatters(const Tensors& outputs, const Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    c10d::ReduceScatterOptions summed = options;
    auto share = divisor(summed.reduceOp);
    return post("reduce_scatter", inputs, outputs, [to = host_view(outputs), from = host_view(inputs), summed, rank = rank_](Backend& gloo) mutable {
      std::vector<Pointer> works;
      for (size_t i = 0; i < to.size(); ++i) {
        Tensors whole{from[i].clone()};
        c10d::AllreduceOptions all;
        all.reduceOp = summed.reduceOp;
        gloo.allreduce(whole, all)->wait();
        to[i].view(-1).copy_(whole[0].view(-1).narrow(0, rank * to[i].numel(), to[i].numel()));
      }
      return works;
    }, divided(outputs, share));
  }

  Pointer post(const std::string& what, const Tensors& reads, const Tensors& writes, Call call, std::function<void()> then = [] {},
               bool alike = true) {
    auto posted = group_ ? *group_ : std::make_shared<Posted>();
    for (const Tensors* tensors : {&reads, &writes})
      for (const auto& tensor : *tensors) {
        TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type(), " in this group");
        TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
        posted->kept.push_back(tensor);
      }
    auto& tracker = Tracker::get();
    tracker.wait(line_, tracker.now(line_of(current)));
    uint64_t time = tracker.begin(line_);
    static auto* names = new std::set<std::string>();
    static auto* guard = new std::mutex();
    const char* name;
    {
      std::lock_guard lock(*guard);
      name = names->insert(what.empty() ? (reads.empty() ? "recv" : "send") : what).first->c_str();
    }
    for (const auto& tensor : reads) tracker.touch(line_, time, tensor.const_data_ptr(), tensor.nbytes(), false, name);
    for (const auto& tensor : writes) tracker.touch(line_, time, tensor.const_data_ptr(), tensor.nbytes(), true, name);
    posted->calls.push_back(std::move(call));
    if (!what.empty()) {
      posted->said += what;
      if (alike)
        for (const Tensors* tensors : {&reads, &writes})
          for (const auto& tensor : *tensors)
            if (what.find("cast") == std::string::npos || tensors == &writes || rank_ == 0 || !reads.empty())
              posted->said += " " + std::to_string(tensor.numel()) + c10::toString(tensor.scalar_type());
      posted->said += ";";
    }
    posted->then = [before = posted->then, then] {
      before();
      then();
    };
    if (group_) return c10::make_intrusive<Enqueued>(own(), posted, Clock());
    return push(posted);
  }

  c10::intrusive_ptr<Communicator> own() { return c10::intrusive_ptr<Communicator>::unsafe_reclaim_from_nonowning(this); }

  Pointer push(std::shared_ptr<Posted> posted) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(posted);
    }
    changed_.notify_all();
    return c10::make_intrusive<Enqueued>(own(), posted, Tracker::get().now(line_));
  }

  void work() {
    for (;;) {
      std::shared_ptr<Posted> posted;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        posted = queue_.front();
        queue_.pop_front();
      }
      try {
        agree(posted->said);
        std::vector<Pointer> works;
        for (const auto& call : posted->calls)
          for (const auto& work : call(*inner_)) works.push_back(work);
        for (const auto& work : works) work->wait();
        posted->then();
      } catch (...) {
        posted->error = std::current_exception();
      }
      {
        std::lock_guard lock(mutex_);
        posted->calls.clear();
        posted->done = true;
      }
      changed_.notify_all();
    }
  }

  // NCCL would hang, or mix up data, where ranks call other things.
  void agree(const std::string& said) {
    if (said.empty() || size_ == 1) return;
    std::string key = std::to_string(number_++);
    if (rank_ == 0) {
      store_->set(key, std::vector<uint8_t>(said.begin(), said.end()));
      return;
    }
    auto found = store_->get(key);
    std::string first(found.begin(), found.end());
    TORCH_CHECK(first == said, "order: call ", key, " of rank ", rank_, " of the group is ", said, " and of rank 0 ", first);
  }

  c10::intrusive_ptr<Backend> inner_;
  c10::intrusive_ptr<c10d::Store> store_;
  size_t line_;
  uint64_t number_ = 0, parts_ = 0;
  std::optional<std::shared_ptr<Posted>> group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Posted>> queue_;
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace

void define_communicator(pybind11::module_& module) {
  py::class_<Communicator, c10::intrusive_ptr<Communicator>, Backend>(module, "Communicator")
      .def_property_readonly("options", &Communicator::getBackendOptions)
      .def("perform_nocolor_split", [](Communicator& parent, const py::object&) { parent.part(); }, py::call_guard<py::gil_scoped_release>());
  module.def("split_by", [](py::object made) { Communicator::maker() = std::move(made); });
  module.def("communicator", [](int rank, int size, const c10::intrusive_ptr<Backend>& inner,
                                const c10::intrusive_ptr<c10d::Store>& store) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Communicator>(rank, size, inner, store);
  });
}

}  // namespace late
