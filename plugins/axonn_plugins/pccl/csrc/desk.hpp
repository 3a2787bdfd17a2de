// Small collectives within a node, without messages: each rank of a group lays its part on a desk of its own board, and takes the
// others' from theirs. A desk has two places: when a rank lays part n + 1, all have laid n, and so have taken n - 1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "board.hpp"
#include "frame.hpp"

namespace pccl {

inline constexpr size_t kDeskBytes = size_t{128} * 1024;  // of a part

// What all ranks see of one; only its own rank writes it.
struct DeskTop {
  struct Part {
    alignas(64) unsigned char header[Header::kBytes];  // of the call
    alignas(64) char data[kDeskBytes];
  };
  alignas(64) std::atomic<uint64_t> laid;   // parts
  alignas(64) std::atomic<uint64_t> taken;  // parts that this rank has taken of all others'
  Part parts[2];

  Part& part(uint64_t number) { return parts[number % 2]; }
};

struct Run;

// A group's, as one of its ranks sees them.
struct Desks {
  enum class State { kOpening, kOpen, kShut } state = State::kOpening;
  bool listed = false;
  std::optional<size_t> at;  // where the own one is on the board
  std::vector<DeskTop*> tops;                  // of all ranks
  std::vector<std::shared_ptr<Board>> boards;  // that those are on
  uint64_t laid = 0;
  std::deque<Run*> calls;  // of which the first is under way
  std::set<int> over;      // peers that take nothing any more
};

}  // namespace pccl
