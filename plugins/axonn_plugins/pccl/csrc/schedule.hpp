// A collective of an accelerator's tensors, enqueued on the current stream: messages by groups of the vendor's library, sums and
// copies by torch. Nothing of it needs the interpreter, and nothing waits on the host.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "delegate.hpp"

namespace pccl {

using Operator = c10d::ReduceOp::RedOpType;

// Buffer (as in program.py), first element, elements.
using Region = std::array<int64_t, 3>;
using Regions = std::vector<Region>;

// A message, or a copy, between memory regions.
struct Transfer {
  int number, kind, peer;  // in the program; as in program.py; the peer's rank in the library's group
  bool first;              // whether this rank's contribution stands on the left of a sum
  int64_t length;
  Regions dst, src;
};

// A rank's part of a program in steps. A step's messages are one group, in which each waits for the others; what was received
// is then added where it belongs.
class Schedule {
 public:
  using Row = std::tuple<int, int, int, bool, int64_t, Regions, Regions>;
  using Rows = std::vector<std::pair<std::vector<Row>, std::vector<Row>>>;

  // `work`: elements of the program's own memory.
  Schedule(BackendPointer inner, const Rows& steps, int64_t work);
  void run(const at::Tensor& input, const at::Tensor& output, Operator op) const;

 private:
  struct Step {
    std::vector<Transfer> messages, locals;
  };
  BackendPointer inner_;
  std::vector<Step> steps_;
  int64_t work_;
};

// The library's own group of the ranks of this rank's node, where each node has as many.
struct Within {
  BackendPointer local;
  int64_t lane, width;
  std::vector<int64_t> firsts;  // of each node's ranks
};

// One collective of one size: a schedule among all ranks, or among those of one lane, and the library's own within the nodes; or the
// library's alone, in memory that is registered with it.
class Route {
 public:
  Route(Collective collective, BackendPointer inner, Schedule schedule, std::optional<Within> within, std::optional<at::Tensor> window)
      : collective_(collective), inner_(std::move(inner)), schedule_(std::move(schedule)), within_(std::move(within)), window_(std::move(window)) {}
  void run(const at::Tensor& output, const at::Tensor& input, Operator op) const;

 private:
  void gather(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs) const;
  void scatter(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs, Operator op) const;
  std::vector<at::Tensor> rows(const at::Tensor& whole) const;
  void all_reduce(const at::Tensor& data, Operator op) const;
  void through_window(const at::Tensor& output, const at::Tensor& input, Operator op) const;

  Collective collective_;
  BackendPointer inner_;
  Schedule schedule_;
  std::optional<Within> within_;
  std::optional<at::Tensor> window_;
};

void define_schedule(py::module_& module);

}  // namespace pccl
