// Messages from one rank to another. Of those with one tag that a rank sends another, the first goes to the first receive that
// may take it.
#include <algorithm>

#include "engine.hpp"

namespace pccl {

// Whether a receive waits for what this peer sends.
bool Engine::may_bring(const Run& run, int peer) const {
  int source = run.program->ops[0].peer;
  return source < 0 ? is_member(run.group, peer) : groups_.at(run.group).peers[source] == peer;
}

void Engine::receive_point(Run& run) {
  const Op& op = run.program->ops[0];
  Slot slot{run.group, op.tag};
  auto unasked = unasked_.find(slot);
  if (unasked != unasked_.end()) {
    auto found = std::ranges::find_if(unasked->second, [&](const Early& early) { return may_bring(run, early.peer); });
    if (found != unasked->second.end()) {
      Early message = std::move(*found);
      unasked->second.erase(found);
      if (unasked->second.empty()) unasked_.erase(unasked);
      release(message);
      wanted_[slot].push_front(&run);
      if (Run* wants = match(message.header, message.peer)) take_point(*wants, message);
      return;
    }
  }
  const std::vector<int>& peers = groups_.at(run.group).peers;
  for (int peer : peers)
    if (lost_.contains(peer) && may_bring(run, peer))
      return fail_group(run.group, describe(run) + " waits for " + rank_name(run.group, peer) + ", but " + lost_.at(peer), true);
  for (auto& [peer, left] : groups_.at(run.group).left)
    if (in_vain(run, peer, left)) return on_left(run.group, peer, Departure(left));
  wanted_[slot].push_back(&run);
  for (int peer : peers)
    if (may_bring(run, peer)) resume(peer);
}

// The receive that a message is for, which no longer waits; none where it has not been asked for. Where it does not match, the
// group fails.
Run* Engine::match(const Header& header, int peer) {
  auto wanted = wanted_.find({header.group, header.tag});
  if (wanted == wanted_.end()) return nullptr;
  auto found = std::ranges::find_if(wanted->second, [&](Run* run) { return may_bring(*run, peer); });
  if (found == wanted->second.end()) return nullptr;
  Run* run = *found;
  const Signature &mine = run->signature, &theirs = header.signature;
  if (theirs.type != mine.type || theirs.elements != mine.elements) {
    fail_group(header.group, describe(*run) + " does not match: " + rank_name(header.group, peer) + " sends " +
                                 std::to_string(theirs.elements) + " " + type_name(theirs.type) + " here; a message must be received as it is sent", true);
    return nullptr;
  }
  wanted->second.erase(found);
  if (wanted->second.empty()) wanted_.erase(wanted);
  if (run->source) *run->source = groups_.at(run->group).places.at(peer);
  return run;
}

// A message that has come before a receive asked for it, or while it did.
void Engine::take_point(Run& run, Early& early) {
  if (early.header.elsewhere()) {
    ripe_.emplace(Order{run.sequence, run.group, 0}, std::move(early));
    return;
  }
  const Op& op = run.program->ops[0];
  Pieces to = run.buffers.pieces(op.to, op.chunk, run.program->chunks);
  if (early.header.bytes != to.bytes()) return unlike(run, early.peer, early.header.bytes, to.bytes());
  copy(Cursor(std::move(to)), Cursor(Pieces(early.body.data(), early.body.size())));
  auto link = links_.find(early.link);
  if (link != links_.end()) acknowledge(*link->second, run, 0, early.header);
  else finish(run, 0);
}

void Engine::hurry(uint64_t group, uint64_t sequence) {
  post([=, this] {
    auto run = runs_.find({group, sequence});
    if (run == runs_.end() || run->second->deadline != Clock::time_point::max()) return;
    run->second->deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(run->second->timeout);
  });
}

}  // namespace pccl
