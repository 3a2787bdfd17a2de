// Groups: who is in them, what ends them, and what is said of it.
#include <algorithm>
#include <climits>
#include <sstream>
#include <stdexcept>

#include "engine.hpp"

namespace pccl {
namespace {

constexpr size_t kMostLeft = 4096;  // calls of a group; what peers send for older ones has long come

std::string seconds(double value) {
  std::ostringstream made;
  made << value;
  return made.str();
}

}  // namespace

void Engine::add_group(uint64_t key, std::vector<int> peers, std::vector<int> ranks, int rank, double timeout) {
  if (peers.size() != ranks.size() || rank < 0 || static_cast<size_t>(rank) >= ranks.size())
    throw std::invalid_argument("a group needs a global rank for every member, and this rank among them");
  post([=, this] {
    groups_[key] = Group{peers, ranks, rank, std::chrono::duration<double>(std::min(timeout, kMostSeconds)), broken_early_[key]};
    broken_early_.erase(key);
    removed_.erase(key);
    std::set<uint64_t> strangers;
    for (auto& [at, early] : early_)
      if (std::get<0>(at) == key && !is_member(key, std::get<2>(at))) strangers.insert(early.link);
    for (uint64_t link : strangers) lose(link, kStranger);
  });
}

void Engine::remove_group(uint64_t key, const std::string& why) {
  post([=, this] {
    // Others may still be busy with what this rank has done its part of.
    auto first = runs_.lower_bound({key, 0});
    fail_group(key, why, first != runs_.end() && first->first.first == key);
    groups_.erase(key);
    newest_.erase(key);
    {
      std::lock_guard lock(mutex_);
      left_.erase(key);
      reasons_.erase(key);
    }
    broken_early_.erase(key);
    removed_.insert(key);
    drop_early(key, std::nullopt);
  });
}

// The group is out of order for good: its ranks no longer agree on what they have done.
void Engine::fail_group(uint64_t key, const std::string& why, bool tell) {
  auto found = groups_.find(key);
  if (found == groups_.end() || !found->second.broken.empty()) return;
  found->second.broken = why;
  std::vector<std::shared_ptr<Run>> failed;
  for (auto at = runs_.lower_bound({key, 0}); at != runs_.end() && at->first.first == key; ++at) failed.push_back(at->second);
  for (auto& run : failed) forget(*run);
  {
    std::lock_guard lock(mutex_);
    reasons_[key] = why;
  }
  // By both links: a peer may have only one, and the other may be the one that ends.
  for (int peer : found->second.peers)
    for (auto* known : {&outgoing_, &incoming_})
      if (auto link = known->find(peer); tell && link != known->end()) this->tell(link->second, key, why.substr(0, Header::kMostText));
  for (auto& run : failed) run->done(why);
}

void Engine::tell(uint64_t id, uint64_t group, const std::string& why) {
  Message message;
  message.owned.assign(why.begin(), why.end());
  Header header;
  header.frame = Frame::kError;
  header.group = group;
  header.bytes = why.size();
  header.write(message.header);
  message.body = Cursor(Pieces(message.owned.data(), message.owned.size()));
  dispatch(*links_.at(id), std::move(message));
}

void Engine::leave(uint64_t group, uint64_t sequence, const Signature& signature) {
  {
    std::lock_guard lock(mutex_);
    auto& left = left_[group];
    left.emplace(sequence, signature);
    if (left.size() > kMostLeft) left.erase(left.begin());
  }
  if (early_count_ == 0) return;
  post([=, this] {
    auto early = early_.lower_bound(Key{group, sequence, INT_MIN, 0});
    if (early == early_.end() || std::get<0>(early->first) != group || std::get<1>(early->first) != sequence) return;
    left_elsewhere(group, sequence, std::get<2>(early->first), Header(early->second.header));
  });
}

// Whether this rank has left a call to another library; its group then fails, for a peer has not.
bool Engine::left_elsewhere(uint64_t key, uint64_t sequence, int peer, const Header& header) {
  std::string mine;
  {
    std::lock_guard lock(mutex_);
    auto group = left_.find(key);
    if (group == left_.end()) return false;
    auto found = group->second.find(sequence);
    if (found == group->second.end()) return false;
    mine = found->second.text();
  }
  auto group = groups_.find(key);
  if (group == groups_.end()) return false;
  fail_group(key, "rank " + std::to_string(group->second.ranks[group->second.rank]) + ": " + mine + ", call " +
                      std::to_string(sequence) + " of its group, is left to the native library and does not match: " +
                      rank_name(key, peer) + " calls " + header.signature.text() +
                      " there; all ranks of a group must make the same calls in the same order", true);
  return true;
}

std::string Engine::broken(uint64_t key) {
  std::lock_guard lock(mutex_);
  auto found = reasons_.find(key);
  return found == reasons_.end() ? "" : found->second;
}

void Engine::expire() {
  Clock::time_point now = Clock::now();
  std::vector<std::shared_ptr<Run>> late;
  for (auto& [key, run] : runs_)
    if (run->asks <= now) late.push_back(run);
  for (auto& run : late)
    if (!run->over) ask(*run);  // which may end runs
  for (auto& [key, run] : runs_) {
    if (run->deadline > now) continue;
    std::set<std::string> missing;
    for (auto& [at, posted] : posted_)
      if (posted.run == run.get()) missing.insert(rank_name(run->group, std::get<2>(at)));
    for (auto& [at, posted] : unread_)
      if (posted.run == run.get()) missing.insert(rank_name(run->group, std::get<2>(at)));
    std::string waited;
    for (const std::string& name : missing) waited += (waited.empty() ? "" : ", ") + name;
    fail_group(run->group,
               describe(*run) + " was not done within " + seconds(run->timeout.count()) + " s; it waits for " +
                   (waited.empty() ? "its own messages to be taken" : waited),
               true);
    return;  // runs_ has changed; what else has expired is seen next time round
  }
}

// A rank that has left the call to another library may never hear of it otherwise: not every schedule sends to all at once.
void Engine::ask(Run& run) {
  run.asks = Clock::now() + kPatience;
  std::set<int> peers;
  for (auto& [at, posted] : posted_)
    if (posted.run == &run) peers.insert(std::get<2>(at));
  Header header;
  header.frame = Frame::kAsk;
  header.signature = run.signature;
  header.group = run.group;
  header.sequence = run.sequence;
  for (int peer : peers) {
    const auto& links = outgoing_.contains(peer) ? outgoing_ : incoming_;
    auto known = links.find(peer);
    if (known == links.end()) continue;
    Message message;
    header.write(message.header);
    dispatch(*links_.at(known->second), std::move(message));
  }
}

std::string Engine::describe(const Run& run) const {
  const Group& group = groups_.at(run.group);
  return "rank " + std::to_string(group.ranks[group.rank]) + ": " + run.signature.text() + ", call " +
         std::to_string(run.sequence) + " of its group,";
}

std::string Engine::rank_name(uint64_t key, int peer) const {
  const Group& group = groups_.at(key);
  for (size_t i = 0; i < group.peers.size(); ++i)
    if (group.peers[i] == peer) return "rank " + std::to_string(group.ranks[i]);
  return "a process that is not of the group";
}

bool Engine::is_member(uint64_t key, int peer) const {
  const std::vector<int>& peers = groups_.at(key).peers;
  return std::find(peers.begin(), peers.end(), peer) != peers.end();
}

std::string Engine::mismatch(const Run& run, int peer, const Header& header) const {
  std::string theirs = header.signature.text(), mine = run.signature.text();
  if (theirs == mine) theirs += " by another schedule";
  return describe(run) + " does not match: " + rank_name(run.group, peer) + " calls " + theirs +
         " there; all ranks of a group must make the same calls in the same order";
}

}  // namespace pccl
