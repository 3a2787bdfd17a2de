// How a program is carried out: ops begin as soon as those that they wait for are done.
#include <algorithm>
#include <cstring>

#include "engine.hpp"
#include "reading.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

// From here on reading the sender's memory beats two copies: through a socket, and through memory that both have.
constexpr size_t kRemoteBytes = 64 * 1024, kRemoteBeyondShared = 128 * 1024;
constexpr int kAsks = 16;  // until a call's time is over, as what one hears goes from rank to rank
constexpr std::chrono::milliseconds kLeastPatience{50};

std::shared_ptr<Run> made(uint64_t group, uint64_t sequence, std::shared_ptr<const Program> program, Signature signature, double timeout,
                          Done done) {
  auto run = std::make_shared<Run>();
  run->group = group;
  run->sequence = sequence;
  run->program = std::move(program);
  run->signature = signature;
  run->buffers.element = type_bytes(signature.type);
  run->timeout = std::chrono::duration<double>(std::min(timeout, kMostSeconds));
  run->done = std::move(done);
  return run;
}

}  // namespace

Begun Engine::start(uint64_t group, uint64_t sequence, std::shared_ptr<const Program> program, Signature signature,
                   void* input, void* output, double timeout, Done done, bool here) {
  auto run = made(group, sequence, std::move(program), signature, timeout, std::move(done));
  Buffers& buffers = run->buffers;
  buffers.input = static_cast<char*>(input);
  buffers.output = static_cast<char*>(output);
  buffers.whole_input = signature.collective != Collective::kAllGather;
  buffers.whole_output = signature.collective != Collective::kReduceScatter;
  size_t blocks = run->program->size, each = signature.elements / blocks, longer = signature.elements % blocks;
  buffers.starts.reserve(blocks + 1);
  for (size_t block = 0; block <= blocks; ++block) buffers.starts.push_back(block * each + std::min(block, longer));
  buffers.longest = each + (longer > 0);
  return start(run, here);
}

Begun Engine::start(uint64_t group, uint64_t sequence, std::shared_ptr<const Program> program, Signature signature,
                   std::vector<Piece> inputs, std::vector<Piece> outputs, double timeout, Done done, bool here, int* source) {
  auto run = made(group, sequence, std::move(program), signature, timeout, std::move(done));
  run->buffers.inputs = std::move(inputs);
  run->buffers.outputs = std::move(outputs);
  run->source = source;
  return start(run, here);
}

Begun Engine::start(const std::shared_ptr<Run>& run, bool here) {
  check_process();
  Turn turn = here ? take_over() : Turn();
  if (turn) {
    guarded([&] { launch(run); }, kWake);
  } else {
    post([this, run] { launch(run); });
  }
  return {std::move(turn), run};
}

void Engine::launch(const std::shared_ptr<Run>& run) {
  auto found = groups_.find(run->group);
  std::string broken = found == groups_.end() ? "its process group was destroyed" : found->second.broken;
  if (!broken.empty()) {
    run->over = true;
    return run->done(broken);
  }
  if (run->timeout.count() == 0) run->timeout = found->second.timeout;
  run->began = Clock::now();
  auto limit = std::chrono::duration_cast<Clock::duration>(run->timeout);
  run->deadline = run->point() ? Clock::time_point::max() : run->began + limit;
  run->patience = std::clamp<Clock::duration>(std::chrono::duration_cast<Clock::duration>(run->timeout) / kAsks, kLeastPatience, kPatience);
  run->asks = run->began + run->patience;
  if (!run->point()) newest_[run->group] = std::max(newest_[run->group], run->sequence);
  runs_[{run->group, run->sequence}] = run;
  for (auto& [key, early] : early_) {
    if (std::get<0>(key) != run->group || std::get<1>(key) != run->sequence) continue;
    if (!(early.header.signature == run->signature))
      return fail_group(run->group, mismatch(*run, std::get<2>(key), early.header), true);
  }
  for (auto& [peer, left] : found->second.left)
    if (!run->receives() && in_vain(*run, peer, left)) return on_left(run->group, peer, Departure(left));
  if (!sit(*run)) carry_out(*run);
}

// By its program.
void Engine::carry_out(Run& run) {
  run.work = std::make_unique_for_overwrite<char[]>(run.program->work_slots * run.buffers.longest * run.buffers.element);
  run.buffers.work = run.work.get();
  const auto& ops = run.program->ops;
  run.left = ops.size();
  run.finished.resize(ops.size());
  run.waits.reserve(ops.size());
  run.ready.reserve(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    run.waits.push_back(ops[i].waits);
    if (ops[i].waits == 0) run.ready.push_back(static_cast<int32_t>(i));
  }
  advance(run);
}

// Nothing may touch the run's memory from here on.
void Engine::forget(Run& run) {
  run.over = true;
  rise(run);
  owe(run);
  std::erase_if(posted_, [&](auto& item) { return item.second.run == &run; });
  std::erase_if(unread_, [&](auto& item) { return item.second.run == &run; });
  if (run.point()) {
    auto wanted = wanted_.find({run.group, run.program->ops[0].tag});
    if (wanted != wanted_.end() && std::erase(wanted->second, &run) && wanted->second.empty()) wanted_.erase(wanted);
  }
  std::erase_if(ripe_, [&](auto& item) { return std::get<0>(item.first) == run.sequence && std::get<1>(item.first) == run.group; });
  drop_early(run.group, run.sequence);
  for (auto& [id, link] : links_) {
    if (link->sink.run == &run) {
      link->sink.kind = Sink::Kind::kDiscard;
      link->sink.run = nullptr;
    }
    std::deque<Message>& queue = link->queue;
    for (size_t i = 0; i < queue.size(); ++i) {
      if (queue[i].run != &run) continue;
      if (i > 0 || queue[i].header_sent == 0) {
        queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i--));
        continue;
      }
      // Half of it is on the wire: the rest must follow, from memory of its own.
      Message& begun = queue[i];
      begun.run = nullptr;
      if (!begun.owned.empty()) continue;
      Cursor rest = begun.body;
      while (!rest.done()) {
        begun.owned.insert(begun.owned.end(), rest.data(), rest.data() + rest.here());
        rest.skip(rest.here());
      }
      begun.body = begun.owned.empty() ? Cursor() : Cursor(Pieces(begun.owned.data(), begun.owned.size()));
    }
  }
  auto found = runs_.find({run.group, run.sequence});
  past_.push_back(std::move(found->second));
  runs_.erase(found);
}

void Engine::advance(Run& run) {
  if (run.advancing) return;
  run.advancing = true;
  while (run.begun < run.ready.size() && !run.over) begin(run, run.ready[run.begun++]);
  run.advancing = false;
  if (run.left == 0 && !run.over) complete(run);
}

void Engine::begin(Run& run, int32_t index) {
  const Op& op = run.program->ops[index];
  switch (op.kind) {
    case Kind::kSend: return send(run, index);
    case Kind::kReceive: case Kind::kReduce: return receive(run, index);
    case Kind::kCopy:
      copy(Cursor(run.buffers.pieces(op.to, op.chunk, run.program->chunks)),
           Cursor(run.buffers.pieces(op.from, op.chunk, run.program->chunks)));
      return finish(run, index);
  }
}

void Engine::finish(Run& run, int32_t index) {
  if (run.over || run.finished[index]) return;
  run.finished[index] = true;
  --run.left;
  for (int32_t next : run.program->ops[index].before)
    if (--run.waits[next] == 0) run.ready.push_back(next);
  advance(run);
}

void Engine::complete(Run& run) {
  if (run.signature.reduction == Reduction::kAverage) {
    const Buffers& buffers = run.buffers;
    int32_t rank = run.program->rank, size = run.program->size;
    for (const Piece& slot : buffers.outputs) divide(run.signature.type, slot.at, slot.bytes / buffers.element, size);
    if (buffers.outputs.empty()) {
      size_t own = buffers.starts[rank + 1] - buffers.starts[rank];
      divide(run.signature.type, buffers.output, buffers.whole_output ? buffers.starts.back() : own, size);
    }
  }
  for (auto [op, at] : run.shown) board_->give_back(at);
  run.shown.clear();
  forget(run);
  run.done("");
}

void Engine::send(Run& run, int32_t index) {
  const Op& op = run.program->ops[index];
  const Group& group = groups_.at(run.group);
  int peer = group.peers[op.peer];
  auto out = outgoing_.find(peer);
  if (out == outgoing_.end() || lost_.contains(peer))
    return fail_group(run.group, describe(run) + " has no link to " + rank_name(run.group, peer) +
                                     (lost_.contains(peer) ? ": " + lost_.at(peer) : ""), true);
  Link& link = *links_.at(out->second);
  Pieces pieces = run.buffers.pieces(op.from, op.chunk, run.program->chunks);
  Header header;
  header.frame = Frame::kData;
  header.signature = run.signature;
  header.group = run.group;
  header.sequence = run.sequence;
  header.bytes = pieces.bytes();
  header.tag = op.tag;
  Message message;
  message.group = run.group;
  message.sequence = run.sequence;
  message.run = &run;
  message.op = index;
  size_t remote = link.shared ? kRemoteBeyondShared : kRemoteBytes;
  std::optional<size_t> shown = link.boarded && header.bytes >= remote ? show(run, op.like, pieces) : std::nullopt;
  if (shown || (link.process > 0 && header.bytes >= remote && pieces.size() <= Header::kMostPieces && can_be_read(pieces))) {
    header.frame = shown ? Frame::kBoard : Frame::kRemote;
    auto add = [&](uint64_t at, uint64_t bytes) {
      uint64_t row[2] = {at, bytes};
      message.owned.insert(message.owned.end(), reinterpret_cast<char*>(row), reinterpret_cast<char*>(row + 2));
      ++header.pieces;
    };
    if (shown) add(*shown, header.bytes);
    else
      for (const Piece& piece : pieces) add(reinterpret_cast<uintptr_t>(piece.at), piece.bytes);
  }
  if (header.elsewhere() || run.point()) {
    unread_[{run.group, run.sequence, peer, op.tag}] = {&run, index};
    message.op = -1;  // done when it is acknowledged
  }
  header.write(message.header);
  message.body = Cursor(message.owned.empty() ? std::move(pieces) : Pieces(message.owned.data(), message.owned.size()));
  dispatch(link, std::move(message));
}

// Lays on the board what several ranks of the node are to read, or one that may not read it from where it is; where. Not where
// there is no room.
std::optional<size_t> Engine::show(Run& run, int32_t like, const Pieces& pieces) {
  auto found = run.shown.find(like);
  if (found != run.shown.end()) return found->second;
  const auto& ops = run.program->ops;
  const std::vector<int>& peers = groups_.at(run.group).peers;
  size_t readers = 0, directly = 0;
  auto look = [&](const Op& op) {
    auto out = outgoing_.find(peers[op.peer]);
    if (out == outgoing_.end()) return;
    readers += links_.at(out->second)->boarded;
    directly += links_.at(out->second)->process > 0;
  };
  if (ops[like].alike < 2) look(ops[like]);
  else for (const Op& op : ops) if (op.like == like) look(op);
  if (readers < 2 && (readers == 0 || directly > 0)) return std::nullopt;
  std::optional<size_t> at = board_->take(pieces.bytes());
  if (!at) return at;
  run.shown[like] = *at;
  char* to = board_->at(*at);
  for (const Piece& piece : pieces) to = static_cast<char*>(std::memcpy(to, piece.at, piece.bytes)) + piece.bytes;
  return at;
}

// Where a run is given up its places on the board stay taken until nobody reads them any more.
void Engine::owe(const Run& run) {
  for (auto [like, at] : run.shown) {
    Owed owed{run.group, {}};
    for (auto& [key, posted] : unread_)
      if (posted.run == &run && run.program->ops[posted.op].like == like) owed.peers.insert(std::get<2>(key));
    if (owed.peers.empty()) board_->give_back(at);
    else owed_.emplace(at, std::move(owed));
  }
}

// A peer reads nothing of the group any more, or of any group.
void Engine::settle(int peer, std::optional<uint64_t> group) {
  for (auto& [key, desks] : desks_)
    if (key == group.value_or(key)) desks.over.insert(peer);
  for (auto owed = owed_.begin(); owed != owed_.end();) {
    if (owed->second.group == group.value_or(owed->second.group)) owed->second.peers.erase(peer);
    if (!owed->second.peers.empty()) {
      ++owed;
      continue;
    }
    board_->give_back(owed->first);
    owed = owed_.erase(owed);
  }
}

void Engine::receive(Run& run, int32_t index) {
  if (run.point()) return receive_point(run);
  const Op& op = run.program->ops[index];
  int peer = groups_.at(run.group).peers[op.peer];
  Key key{run.group, run.sequence, peer, op.tag};
  auto early = early_.find(key);
  if (early != early_.end()) {
    Early message = std::move(early->second);
    early_.erase(early);
    release(message);
    return take_early(run, index, message);
  }
  if (lost_.contains(peer))
    return fail_group(run.group, describe(run) + " waits for " + rank_name(run.group, peer) + ", but " + lost_.at(peer), true);
  posted_[key] = {&run, index};
  resume(peer);
}

// A message is not as long as its op expects.
void Engine::unlike(const Run& run, int peer, size_t bytes, size_t expected) {
  Type type = run.signature.type;
  fail_group(run.group, describe(run) + " expects " + amount(expected, type) + " from " + rank_name(run.group, peer) + " and gets " +
                            amount(bytes, type) + "; what a rank sends must be as long as the other expects it", true);
}

// Whether a message is as long as its op expects; the group fails where not.
bool Engine::accept(Link& link, Run& run, const Header& header, size_t expected) {
  if (header.bytes == expected) return true;
  unlike(run, link.peer, header.bytes, expected);
  return false;
}

}  // namespace pccl
