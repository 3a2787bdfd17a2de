// Groups: who is in them, what ends them, and what is said of it.
#include <algorithm>
#include <stdexcept>

#include "engine.hpp"

namespace pccl {
namespace {

constexpr std::chrono::seconds kTelling{60};  // for so long a failure may be why a rank leaves other groups

}  // namespace

void Engine::add_group(uint64_t key, std::vector<int> peers, std::vector<int> ranks, int rank, double timeout) {
  if (peers.size() != ranks.size() || rank < 0 || static_cast<size_t>(rank) >= ranks.size())
    throw std::invalid_argument("a group needs a global rank for every member, and this rank among them");
  post([=, this] {
    Group group;
    group.peers = peers;
    for (size_t at = 0; at < peers.size(); ++at) group.places[peers[at]] = static_cast<int>(at);
    group.ranks = ranks;
    group.rank = rank;
    group.timeout = std::chrono::duration<double>(std::min(timeout, kMostSeconds));
    group.broken = broken_early_[key];
    group.left = left_early_[key];
    groups_[key] = std::move(group);
    broken_early_.erase(key);
    left_early_.erase(key);
    removed_.erase(key);
    std::set<uint64_t> strangers;
    for (auto& [at, early] : early_)
      if (std::get<0>(at) == key && !is_member(key, std::get<2>(at))) strangers.insert(early.link);
    for (auto& [slot, unasked] : unasked_)
      for (const Early& early : unasked)
        if (slot.first == key && !is_member(key, early.peer)) strangers.insert(early.link);
    for (uint64_t link : strangers) lose(link, kStranger);
  });
}

void Engine::attend(uint64_t key, Reach reach) {
  post([=, this] {
    auto found = groups_.find(key);
    if (found != groups_.end()) found->second.reach = reach;
  });
}

void Engine::refuse(uint64_t key, uint64_t sequence, const std::string& why) {
  post([=, this] {
    auto found = groups_.find(key);
    if (found == groups_.end()) return;
    found->second.refused = sequence;
    found->second.refusal = why;
    found->second.refused_at = Clock::now();
  });
}

void Engine::remove_group(uint64_t key, const std::string& what, uint64_t sequence) {
  post([=, this] {
    auto found = groups_.find(key);
    if (found != groups_.end()) {
      Group& group = found->second;
      group.reach = {};
      std::string why = "rank " + std::to_string(group.ranks[group.rank]) + " " + what;
      auto first = runs_.lower_bound({key, 0});
      // Others may still be busy with what this rank has done its part of.
      bool under_way = first != runs_.end() && first->first.first == key;
      Ended ended{sequence, group.broken.empty() && under_way ? why : group.broken, {}};
      fail_group(key, why, under_way);
      ended.told = std::move(group.told);
      if (ended.why.empty())
        for (uint64_t id : links_of(group))
          if (ended.told.insert(id).second) tell_left(*links_.at(id), key, sequence);
      leave_desk(key, group);
      removed_.emplace(key, std::move(ended));
      groups_.erase(found);
    }
    newest_.erase(key);
    {
      std::lock_guard lock(mutex_);
      reasons_.erase(key);
    }
    broken_early_.erase(key);
    left_early_.erase(key);
    drop_early(key, std::nullopt);
  });
}

void Engine::give_up(uint64_t key, const std::string& why) {
  post([=, this] { fail_group(key, why, true); });
}

// The group is out of order for good: its ranks no longer agree on what they have done.
void Engine::fail_group(uint64_t key, const std::string& why, bool tell) {
  auto found = groups_.find(key);
  if (found == groups_.end() || !found->second.broken.empty()) return;
  found->second.broken = why;
  {
    std::lock_guard lock(mutex_);
    reasons_[key] = why;
  }
  std::vector<std::shared_ptr<Run>> failed;
  for (auto at = runs_.lower_bound({key, 0}); at != runs_.end() && at->first.first == key; ++at) failed.push_back(at->second);
  for (auto& run : failed) forget(*run);
  drop_early(key, std::nullopt);
  if (tell) {
    trouble_ = why;
    troubled_ = Clock::now();
    tell_all(found->second, key);
  }
  for (auto& run : failed) run->done(why);
}

// By both links: a peer may have only one, and the other may be the one that ends.
void Engine::tell_all(Group& group, uint64_t key) {
  for (uint64_t id : links_of(group))
    if (group.told.insert(id).second) tell(*links_.at(id), key, group.broken);
}

void Engine::tell_left(Link& link, uint64_t group, uint64_t sequence) {
  bool recent = !trouble_.empty() && Clock::now() - troubled_ < kTelling;
  tell(link, Frame::kLeft, group, sequence, trouble_.data(), recent ? std::min<size_t>(trouble_.size(), Header::kMostText) : 0);
}

std::vector<uint64_t> Engine::links_of(const Group& group) const {
  std::vector<uint64_t> made;
  for (int peer : group.peers)
    for (auto* known : {&outgoing_, &incoming_})
      if (auto link = known->find(peer); link != known->end()) made.push_back(link->second);
  return made;
}

void Engine::tell(Link& link, uint64_t group, const std::string& why) {
  tell(link, Frame::kError, group, 0, why.data(), std::min<size_t>(why.size(), Header::kMostText));
}

void Engine::tell(Link& link, Frame frame, uint64_t group, uint64_t sequence, const void* body, size_t bytes) {
  Message message;
  if (bytes > 0) message.owned.assign(static_cast<const char*>(body), static_cast<const char*>(body) + bytes);
  Header header;
  header.frame = frame;
  header.group = group;
  header.sequence = sequence;
  header.bytes = bytes;
  header.write(message.header);
  if (bytes > 0) message.body = Cursor(Pieces(message.owned.data(), message.owned.size()));
  dispatch(link, std::move(message));
}

std::string Engine::broken(uint64_t key) {
  std::lock_guard lock(mutex_);
  auto found = reasons_.find(key);
  return found == reasons_.end() ? "" : found->second;
}

std::string Engine::describe(const Run& run) const {
  const Group& group = groups_.at(run.group);
  std::string made = "rank " + std::to_string(group.ranks[group.rank]) + ": ";
  if (!run.point()) return made + run.signature.text() + ", call " + std::to_string(run.sequence) + " of its group,";
  const Op& op = run.program->ops[0];
  std::string of = " of " + std::to_string(run.signature.elements) + " " + type_name(run.signature.type);
  std::string peer = op.peer < 0 ? "any rank" : "rank " + std::to_string(group.ranks[op.peer]);
  return made + (op.kind == Kind::kSend ? "send" + of + " to " : "recv" + of + " from ") + peer +
         (op.tag ? " with tag " + std::to_string(op.tag) : "");
}

std::string Engine::rank_name(uint64_t key, int peer) const {
  const Group& group = groups_.at(key);
  auto place = group.places.find(peer);
  return place == group.places.end() ? "a process that is not of the group" : "rank " + std::to_string(group.ranks[place->second]);
}

bool Engine::is_member(uint64_t key, int peer) const {
  return groups_.at(key).places.contains(peer);
}

std::string Engine::mismatch(const Run& run, int peer, const Header& header) const {
  std::string theirs = header.signature.text(), mine = run.signature.text();
  if (theirs == mine) theirs += " by another schedule";
  return describe(run) + " does not match: " + rank_name(run.group, peer) + " calls " + theirs +
         " there; all ranks of a group must make the same calls in the same order";
}

}  // namespace pccl
