// Calls at desks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

constexpr size_t kTwice = 64 * 1024;  // bytes of all parts of an all-reduce, from which on each rank adds up a block
constexpr int kMostDesks = 16;       // of a process; their boards have other uses

bool reduces_all(const Run& run) {
  Collective collective = run.signature.collective;
  return collective != Collective::kAllGather && collective != Collective::kReduceScatter;
}

size_t all_bytes(const Run& run) { return run.buffers.starts.back() * run.buffers.element; }

int parts_of(const Run& run) {
  size_t ranks = run.program->size;
  return reduces_all(run) && ranks > 2 && all_bytes(run) * ranks >= kTwice ? 2 : 1;
}

// At most.
size_t part_bytes(const Run& run) {
  return run.signature.collective == Collective::kAllGather ? run.buffers.longest * run.buffers.element : all_bytes(run);
}

struct Block {
  size_t from, bytes;
};

Block block_of(const Run& run, size_t rank) {
  const Buffers& buffers = run.buffers;
  return {buffers.starts[rank] * buffers.element, (buffers.starts[rank + 1] - buffers.starts[rank]) * buffers.element};
}

// In the order of ranks, so that all get the same bits.
void add_up(const Run& run, const Desks& desks, uint64_t number, Block of, char* to) {
  auto data = [&](size_t rank) { return desks.tops[rank]->part(number).data + of.from; };
  size_t elements = of.bytes / run.buffers.element;
  combine(run.signature.type, run.signature.reduction, to, data(0), data(1), elements);
  for (size_t rank = 2; rank < desks.tops.size(); ++rank) combine(run.signature.type, run.signature.reduction, to, to, data(rank), elements);
}

void put_bytes(char* to, const char* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

// Has a call done at desks, where its group has them; false where it is to be done by its program.
bool Engine::sit(Run& run) {
  if (!run.program->desks || part_bytes(run) > kDeskBytes) return false;
  Desks& desks = desks_[run.group];
  if (desks.tops.empty()) {
    desks.tops.resize(run.program->size);
    desks.boards.resize(run.program->size);
  }
  if (desks.state == Desks::State::kShut) return false;
  run.sits = true;
  desks.calls.push_back(&run);
  if (desks.calls.size() > 1) return true;
  busy_desks_.push_back(run.group);
  go_on(run.group);
  return true;
}

// What can be done at desks; whether there was anything.
bool Engine::poll_desks() {
  bool found = false;
  for (size_t i = 0; i < busy_desks_.size(); ++i)
    guarded([&, group = busy_desks_[i]] { found |= go_on(group); }, kWake);
  return found;
}

void Engine::rise(Run& run) {
  auto found = desks_.find(run.group);
  if (!std::exchange(run.sits, false) || found == desks_.end()) return;
  std::erase(found->second.calls, &run);
  if (found->second.calls.empty()) std::erase(busy_desks_, run.group);
}

// As far as the calls at a group's desks can go; whether they went on.
bool Engine::go_on(uint64_t group) {
  bool moved = false;
  while (true) {
    auto found = desks_.find(group);
    if (found == desks_.end() || found->second.calls.empty()) return moved;
    Desks& desks = found->second;
    Run& run = *desks.calls.front();
    if (desks.state == Desks::State::kOpening) {
      open(group, desks);
      if (desks.state == Desks::State::kOpening) {
        fail_for_lost(run);
        return moved;
      }
      moved = true;
      if (desks.state == Desks::State::kShut) {
        std::vector<std::shared_ptr<Run>> all;
        for (Run* call : desks.calls) all.push_back(runs_.at({group, call->sequence}));
        for (auto& call : all) rise(*call);
        for (auto& call : all)
          if (!call->over) carry_out(*call);
        return true;
      }
    }
    if (!run.lies) {
      lay(run, desks);
      fail_for_lost(run);
      if (run.over) return true;
    }
    bool all = true;
    for (size_t rank = 0; rank < desks.tops.size(); ++rank) {
      bool here = arrived(run, desks, rank);
      if (here && !agrees(run, desks, rank)) return true;
      all &= here;
    }
    if (!all) return moved;
    moved = true;
    take(run, desks);
  }
}

// Finds the group's desks, or that there is a rank without one: then nobody uses them, as each of the others sees that rank's word,
// or has none itself as it does not see that rank's board.
void Engine::open(uint64_t key, Desks& desks) {
  const Group& group = groups_.at(key);
  auto board_of = [&](size_t rank) -> std::optional<std::shared_ptr<Board>> {
    auto link = incoming_.find(group.peers[rank]);
    if (link == incoming_.end() || !outgoing_.contains(group.peers[rank])) return std::nullopt;
    const Link& in = *links_.at(link->second);
    return in.board && in.board->directory() && links_.at(outgoing_.at(group.peers[rank]))->shared ? in.board : nullptr;
  };
  size_t own = group.rank;
  if (!desks.listed) {
    bool all = board_ && board_->directory();
    for (size_t rank = 0; rank < desks.tops.size(); ++rank) {
      if (rank == own) continue;
      auto board = board_of(rank);
      if (!board) return;
      all &= *board != nullptr;
      desks.boards[rank] = *board;
    }
    auto have = std::ranges::count_if(desks_, [](auto& item) { return item.second.at.has_value(); });
    if (all && have < kMostDesks) desks.at = board_->take(sizeof(DeskTop));
    if (desks.at) {
      desks.tops[own] = reinterpret_cast<DeskTop*>(board_->at(*desks.at));
      desks.tops[own]->laid.store(0);
      desks.tops[own]->taken.store(0);
    }
    desks.listed = true;
    if (board_ && board_->directory()) {
      bool told = board_->directory()->list(key, desks.at.value_or(kNoDesk));
      if (!told && desks.at) board_->give_back(*std::exchange(desks.at, std::nullopt));
      call_all(group);
    }
    if (!desks.at) desks.state = Desks::State::kShut;
  }
  size_t known = 0;
  for (size_t rank = 0; rank < desks.tops.size() && desks.state == Desks::State::kOpening; ++rank) {
    if (desks.tops[rank]) {
      ++known;
      continue;
    }
    auto listed = desks.boards[rank]->directory()->find(key);
    if (!listed) continue;
    if (*listed == kNoDesk || !desks.boards[rank]->has(*listed, sizeof(DeskTop)) || *listed % alignof(DeskTop)) {
      desks.state = Desks::State::kShut;
      break;
    }
    desks.tops[rank] = reinterpret_cast<DeskTop*>(desks.boards[rank]->at(*listed));
    ++known;
  }
  if (known == desks.tops.size()) desks.state = Desks::State::kOpen;
  if (desks.state == Desks::State::kShut && desks.at) board_->give_back(*std::exchange(desks.at, std::nullopt));
}

// Wakes those of a group who sleep.
void Engine::call_all(const Group& group) {
  for (int peer : group.peers)
    if (auto out = outgoing_.find(peer); out != outgoing_.end()) links_.at(out->second)->call();
}

// This rank's part of a call, or its block of the sums, for all to take.
void Engine::lay(Run& run, Desks& desks) {
  const Group& group = groups_.at(run.group);
  size_t rank = group.rank;
  DeskTop& top = *desks.tops[rank];
  DeskTop::Part& part = top.part(desks.laid + 1);
  Header header;
  header.frame = Frame::kData;
  header.signature = run.signature;
  header.group = run.group;
  header.sequence = run.sequence;
  header.tag = static_cast<uint32_t>(run.part);
  header.write(part.header);
  if (run.part == 1) add_up(run, desks, desks.laid, block_of(run, rank), part.data);
  else put_bytes(part.data, run.buffers.input, run.signature.collective == Collective::kAllGather ? block_of(run, rank).bytes : all_bytes(run));
  if (run.part == 1) top.taken.store(desks.laid);
  top.laid.store(++desks.laid);
  run.lies = true;
  ++laid_;
  call_all(group);
}

// Whether a rank's part of a call lies there.
bool Engine::arrived(const Run& run, const Desks& desks, size_t rank) const {
  if (!run.lies || desks.tops[rank]->laid.load() < desks.laid) return false;
  if (same_header(run, desks, rank)) return true;
  Header theirs;
  return !theirs.read(desks.tops[rank]->part(desks.laid).header).empty() || theirs.sequence == run.sequence;
}

bool Engine::same_header(const Run& run, const Desks& desks, size_t rank) const {
  const unsigned char* mine = desks.tops[groups_.at(run.group).rank]->part(desks.laid).header;
  return std::memcmp(mine, desks.tops[rank]->part(desks.laid).header, Header::kBytes) == 0;
}

// Whether what lies there is of the same call; its group has failed where not.
bool Engine::agrees(const Run& run, const Desks& desks, size_t rank) {
  if (same_header(run, desks, rank)) return true;
  int peer = groups_.at(run.group).peers[rank];
  Header theirs;
  std::string wrong = theirs.read(desks.tops[rank]->part(desks.laid).header);
  fail_group(run.group, wrong.empty() ? mismatch(run, peer, theirs) : describe(run) + " needs " + rank_name(run.group, peer) + ", but " + wrong,
             true);
  return false;
}

// All parts of a call are there.
void Engine::take(Run& run, Desks& desks) {
  size_t own = groups_.at(run.group).rank;
  const Buffers& buffers = run.buffers;
  uint64_t number = desks.laid;
  if (run.part + 1 < parts_of(run)) {
    ++run.part;
    run.lies = false;
    return;
  }
  if (run.signature.collective == Collective::kReduceScatter) {
    add_up(run, desks, number, block_of(run, own), buffers.output);
  } else if (reduces_all(run) && run.part == 0) {
    add_up(run, desks, number, {0, all_bytes(run)}, buffers.output);
  } else {
    for (size_t rank = 0; rank < desks.tops.size(); ++rank) {
      Block of = block_of(run, rank);
      put_bytes(buffers.output + of.from, desks.tops[rank]->part(number).data, of.bytes);
    }
  }
  desks.tops[own]->taken.store(number);
  complete(run);
}

// Those whose parts a call at desks waits for. Until all desks are known nobody lays anything, so others may be in another call.
std::vector<int> Engine::missing(const Run& run) const {
  std::vector<int> made;
  const Desks& desks = desks_.at(run.group);
  const Group& group = groups_.at(run.group);
  for (size_t rank = 0; rank < desks.tops.size(); ++rank) {
    bool here = desks.state == Desks::State::kOpen && arrived(*desks.calls.front(), desks, rank);
    if (static_cast<int>(rank) != group.rank && !here) made.push_back(group.peers[rank]);
  }
  return made;
}

void Engine::fail_for_lost(const Run& run) {
  for (int peer : missing(run))
    if (lost_.contains(peer))
      return fail_group(run.group, describe(run) + " waits for " + rank_name(run.group, peer) + ", but " + lost_.at(peer), true);
}

// The group's is needed no longer when nobody may still be taking from it.
void Engine::leave_desk(uint64_t key, const Group& group) {
  auto found = desks_.extract(key);
  if (!found) return;
  Desks& desks = found.mapped();
  if (desks.listed && board_ && board_->directory()) board_->directory()->strike(key);
  if (!desks.at) return;
  Owed owed{key, {}};
  for (size_t rank = 0; rank < desks.tops.size(); ++rank) {
    int peer = group.peers[rank];
    bool done = desks.tops[rank] && desks.tops[rank]->taken.load() >= desks.laid;
    if (static_cast<int>(rank) != group.rank && !done && !desks.over.contains(peer) && !lost_.contains(peer))
      owed.peers.insert(peer);
  }
  if (owed.peers.empty()) board_->give_back(*desks.at);
  else owed_.emplace(*desks.at, std::move(owed));
}

}  // namespace pccl
