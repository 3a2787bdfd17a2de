// Inputs that lie where outputs do: what comes in would be written over them before they are sent.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "frame.hpp"

namespace pccl {

using Extent = std::pair<const char*, const char*>;  // from, to

// Where a contiguous tensor lies; all that are empty lie nowhere.
inline Extent extent(const at::Tensor& tensor) {
  if (tensor.nbytes() == 0) return {nullptr, nullptr};
  const char* from = static_cast<const char*>(tensor.const_data_ptr());
  return {from, from + tensor.nbytes()};
}

inline bool overlap(Extent one, Extent other) { return one.first < other.second && other.first < one.second; }

// The input of a call with a schedule, or a copy where it lies in the output's memory other than in its own place, which a schedule may rely on.
inline at::Tensor apart(Collective collective, int rank, const at::Tensor& input, const at::Tensor& output) {
  Extent in = extent(input), out = extent(output);
  if (!overlap(in, out)) return input;
  bool placed = in.first == out.first;
  if (collective == Collective::kAllGather) placed = in.first == out.first + rank * (in.second - in.first);
  if (collective == Collective::kReduceScatter) placed = out.first == in.first + rank * (out.second - out.first);
  if (placed) return input;
  at::NoGradGuard no_grad;
  return input.clone();
}

// The same of lists, or of the one tensor that stands for this rank's.
inline std::vector<at::Tensor> apart(int rank, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
  auto own = [rank](const std::vector<at::Tensor>& list) { return list.size() == 1 ? 0 : static_cast<size_t>(rank); };
  std::vector<Extent> taken, all;
  for (const auto& output : outputs) all.push_back(extent(output));
  for (Extent each : all)
    if (each.first) taken.push_back(each);
  std::ranges::sort(taken);
  for (size_t i = 1; i < taken.size(); ++i) taken[i].second = std::max(taken[i].second, taken[i - 1].second);
  std::vector<at::Tensor> made = inputs;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Extent in = extent(inputs[i]);
    auto beyond = std::ranges::lower_bound(taken, in.second, {}, &Extent::first);
    bool shares = in.first && beyond != taken.begin() && in.first < std::prev(beyond)->second;
    // Its own place: nothing is moved there.
    if (shares && i == own(inputs) && all[own(outputs)] == in) {
      shares = false;
      for (size_t j = 0; j < all.size(); ++j) shares |= j != own(outputs) && overlap(in, all[j]);
    }
    if (shares) made[i] = inputs[i].clone();
  }
  return made;
}

}  // namespace pccl
