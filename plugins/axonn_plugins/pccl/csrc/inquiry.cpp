// Who is waited for: what ranks ask each other when a call takes long, calls that were left to another library, and ranks
// that have left a group.
#include <algorithm>
#include <climits>
#include <cstring>
#include <sstream>

#include "engine.hpp"

namespace pccl {
namespace {

constexpr size_t kMostLeft = 4096;  // calls of a group; what peers send for older ones has long come
constexpr std::chrono::milliseconds kLook{100};

std::string seconds(double value) {
  std::ostringstream made;
  made << value;
  return made.str();
}

}  // namespace

std::shared_ptr<Watch> Engine::leave(uint64_t group, uint64_t sequence, const Signature& signature) {
  auto watch = std::make_shared<Watch>();
  watch->signature = signature;
  {
    std::lock_guard lock(mutex_);
    auto& left = left_[group];
    left.emplace(sequence, watch);
    if (left.size() > kMostLeft) left.erase(left.begin());
    watched_.emplace(std::pair(group, sequence), watch);
  }
  if (early_count_ == 0) return watch;
  post([=, this] {
    auto early = early_.lower_bound(Key{group, sequence, INT_MIN, 0});
    if (early == early_.end() || std::get<0>(early->first) != group || std::get<1>(early->first) != sequence) return;
    left_elsewhere(group, sequence, std::get<2>(early->first), Header(early->second.header));
  });
  return watch;
}

// Whether this rank has left a call to another library; its group then fails, unless the peer has left it likewise.
bool Engine::left_elsewhere(uint64_t key, uint64_t sequence, int peer, const Header& header) {
  std::string mine;
  {
    std::lock_guard lock(mutex_);
    auto group = left_.find(key);
    if (group == left_.end()) return false;
    auto found = group->second.find(sequence);
    if (found == group->second.end()) return false;
    const Signature& signature = found->second->signature;
    if (header.frame == Frame::kAsk && header.tag == 1 && signature.like(header.signature)) return false;
    mine = signature.text();
  }
  auto group = groups_.find(key);
  if (group == groups_.end()) return false;
  std::string theirs = header.signature.text();
  if (theirs == mine) theirs += header.frame == Frame::kAsk && header.tag == 1 ? " with another root or operation" : " by a schedule of ours";
  fail_group(key, "rank " + std::to_string(group->second.ranks[group->second.rank]) + ": " + mine + ", call " +
                      std::to_string(sequence) + " of its group, is left to the native library and does not match: " +
                      rank_name(key, peer) + " calls " + theirs +
                      " there; all ranks of a group must make the same calls in the same order", true);
  return true;
}

std::string Engine::suspects(uint64_t key) {
  std::lock_guard lock(mutex_);
  auto found = suspects_.find(key);
  return found == suspects_.end() ? "" : found->second;
}

void Engine::ask_all(uint64_t key) {
  post([=, this] {
    auto group = groups_.find(key);
    if (group == groups_.end()) return;
    std::set<int> peers(group->second.peers.begin(), group->second.peers.end());
    peers.erase(group->second.peers[group->second.rank]);
    ask(key, 0, {}, peers, true);
  });
}

// Where a call takes long, those that it waits for are asked.
void Engine::ask() {
  Clock::time_point now = Clock::now();
  std::vector<std::shared_ptr<Run>> late;
  for (auto& [key, run] : runs_)
    if (run->asks <= now) late.push_back(run);
  for (auto& run : late) {
    if (run->over) continue;  // to ask may end runs
    run->asks = now + run->patience;
    ask(run->group, run->sequence, run->signature, awaited(*run), false);
  }
  if (now < looked_ + kLook) return;
  looked_ = now;
  std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<Watch>> waiting;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(watched_, [](auto& item) { return item.second->over.load(); });
    for (auto& item : watched_)
      if (item.second->asks <= now) waiting.insert(item);
  }
  for (auto& [at, watch] : waiting) {
    auto [key, sequence] = at;
    auto found = groups_.find(key);
    if (found == groups_.end() || !found->second.broken.empty()) continue;
    watch->asks = now + kPatience;
    Group& group = found->second;
    auto gone = std::ranges::find_if(group.left, [&, last = sequence](auto& item) { return item.second.sequence < last; });
    if (gone != group.left.end()) {
      on_left(key, gone->first, Departure(gone->second));
      continue;
    }
    std::string known = in_words(suspected(group, sequence, next(group), kPatience));
    if (!known.empty()) {
      std::lock_guard lock(mutex_);
      suspects_[key] = known;
    }
    ask(key, sequence, watch->signature, next(group), true);
  }
}

void Engine::ask(uint64_t key, uint64_t sequence, const Signature& signature, const std::set<int>& peers, bool left) {
  Header header;
  header.frame = Frame::kAsk;
  header.signature = signature;
  header.group = key;
  header.sequence = sequence;
  header.tag = left;
  for (int peer : peers) {
    auto group = groups_.find(key);
    if (group == groups_.end() || !group->second.broken.empty()) return;
    State& state = group->second.states[peer];
    if (!state.asked) state.asked = Clock::now();
    const auto& links = outgoing_.contains(peer) ? outgoing_ : incoming_;
    auto known = links.find(peer);
    if (known == links.end()) {
      if (group->second.hooks.reach && !lost_.contains(peer)) group->second.hooks.reach(peer, !left);
      continue;
    }
    Message message;
    header.write(message.header);
    dispatch(*links_.at(known->second), std::move(message));
  }
}

// Whom a run waits for.
std::set<int> Engine::awaited(const Run& run) const {
  std::set<int> peers;
  for (auto* list : {&posted_, &unread_})
    for (auto& [at, posted] : *list)
      if (posted.run == &run) peers.insert(std::get<2>(at));
  for (auto& [id, link] : links_) {
    bool waits = link->sink.run == &run;
    for (const Message& message : link->queue) waits |= message.run == &run;
    if (waits) peers.insert(link->peer);
  }
  return peers;
}

// Whom a rank asks that cannot know whom it waits for: so everybody is asked by somebody.
std::set<int> Engine::next(const Group& group) const {
  size_t after = (group.rank + 1) % group.peers.size();
  if (after == static_cast<size_t>(group.rank)) return {};
  return {group.peers[after]};
}

Engine::Suspects Engine::suspected(const Group& group, uint64_t sequence, const std::set<int>& peers, Clock::duration patience) const {
  Suspects made;
  for (int peer : peers) {
    auto state = group.states.find(peer);
    if (state == group.states.end()) continue;
    uint32_t rank = group.ranks[std::ranges::find(group.peers, peer) - group.peers.begin()];
    if (state->second.asked && Clock::now() - *state->second.asked > patience * 3 / 4) {
      made.push_back({rank, kSilent, 0});
    } else if (state->second.known) {
      if (state->second.sequence < sequence) made.push_back({rank, 0, state->second.sequence});
      made.insert(made.end(), state->second.suspects.begin(), state->second.suspects.end());
    }
  }
  std::ranges::sort(made, std::less{}, [](const Suspect& found) { return std::pair(found.rank, found.how); });
  auto again = std::ranges::unique(made, std::equal_to{}, &Suspect::rank);
  made.erase(again.begin(), again.end());
  auto own = static_cast<uint32_t>(group.ranks[group.rank]);
  std::erase_if(made, [&](const Suspect& found) { return found.rank == own && !(found.how & kElsewhere); });
  made.resize(std::min(made.size(), Header::kMostRows));
  return made;
}

// Whom this rank waits for in groups other than this one, which may be why it does not come here; as far as those asked there
// have had the time to answer.
Engine::Suspects Engine::elsewhere(uint64_t key) {
  Suspects made;
  auto add = [&](uint64_t other, uint64_t sequence, const std::set<int>& peers, Clock::duration patience, Clock::time_point began) {
    auto group = groups_.find(other);
    if (other == key || group == groups_.end() || Clock::now() < began + patience * 3 / 2) return;
    for (Suspect& found : suspected(group->second, sequence, peers, patience)) {
      found.how |= kElsewhere;
      made.push_back(found);
    }
  };
  for (auto& [at, run] : runs_) add(at.first, at.second, awaited(*run), run->patience, run->began);
  std::lock_guard lock(mutex_);
  for (auto& [at, watch] : watched_) {
    auto group = groups_.find(at.first);
    if (group != groups_.end() && !watch->over) add(at.first, at.second, next(group->second), kPatience, watch->began);
  }
  made.resize(std::min(made.size(), Header::kMostRows));
  return made;
}

std::string Engine::in_words(const Suspects& suspects) {
  std::string made;
  for (const Suspect& found : suspects) {
    made += made.empty() ? "" : "; ";
    if (found.how & kElsewhere) made += "in another group, ";
    made += "rank " + std::to_string(found.rank);
    if (found.how & kSilent) made += " does not answer";
    else made += std::string(" has not made ") + (found.how & kElsewhere ? "the call waited for there" : "this call") + ", its last is call " +
                 std::to_string(found.sequence);
  }
  return made;
}

void Engine::on_ask(Link& link, const Header& header) {
  auto found = groups_.find(header.group);
  if (found == groups_.end() || left_elsewhere(header.group, header.sequence, link.peer, header)) return;
  auto run = runs_.find({header.group, header.sequence});
  if (run != runs_.end() && (header.tag == 1 || !(run->second->signature == header.signature)))
    return fail_group(header.group, mismatch(*run->second, link.peer, header), true);
  const Group& group = found->second;
  uint64_t newest = newest_[header.group];
  Suspects suspects;
  run = runs_.lower_bound({header.group, 0});
  if (run != runs_.end() && run->first.first == header.group && run->first.second <= header.sequence)
    suspects = suspected(group, run->first.second, awaited(*run->second), run->second->patience);
  std::optional<uint64_t> watched;
  {
    std::lock_guard lock(mutex_);
    auto left = left_.find(header.group);
    if (left != left_.end() && !left->second.empty()) newest = std::max(newest, left->second.rbegin()->first);
    auto watch = watched_.lower_bound({header.group, 0});
    if (watch != watched_.end() && watch->first.first == header.group && !watch->second->over) watched = watch->first.second;
  }
  if (suspects.empty() && watched) suspects = suspected(group, *watched, next(group), kPatience);
  if (suspects.empty() && newest < header.sequence) suspects = elsewhere(header.group);
  tell(link, Frame::kState, header.group, newest, suspects.data(), suspects.size() * sizeof(Suspect));
}

void Engine::on_state(const Link& link, const Header& header, const std::vector<char>& body) {
  auto found = groups_.find(header.group);
  if (found == groups_.end()) return;
  static_assert(sizeof(Suspect) == Header::kRowBytes);
  State& state = found->second.states[link.peer];
  state.known = true;
  state.asked.reset();
  state.sequence = header.sequence;
  state.suspects.resize(body.size() / sizeof(Suspect));
  if (!body.empty()) std::memcpy(state.suspects.data(), body.data(), body.size());
}

// A peer has left the group: calls after its last one cannot be done.
void Engine::on_left(uint64_t key, int peer, const Departure& left) {
  auto found = groups_.find(key);
  if (found == groups_.end()) {
    if (left_early_.size() < kMostBroken) left_early_[key].emplace(peer, left);
    return;
  }
  found->second.left.emplace(peer, left);
  uint64_t sequence = left.sequence;
  std::string gone = rank_name(key, peer) + " has left the group after call " + std::to_string(sequence) + " of it (" +
                     (left.why.empty() ? "destroy_process_group, or its end" : "it was told before: " + left.why) + ")";
  std::string call;
  auto run = runs_.upper_bound({key, sequence});
  if (run != runs_.end() && run->first.first == key) call = describe(*run->second);
  {
    std::lock_guard lock(mutex_);
    suspects_[key] = gone;
    auto watch = watched_.upper_bound({key, sequence});
    const Group& group = found->second;
    if (call.empty() && watch != watched_.end() && watch->first.first == key && !watch->second->over)
      call = "rank " + std::to_string(group.ranks[group.rank]) + ": " + watch->second->signature.text() + ", call " +
             std::to_string(watch->first.second) + " of its group,";
  }
  if (!call.empty()) fail_group(key, call + " cannot be done: " + gone, true);
}

// What came is for a group that is out of order here, or that this rank has left: who sends it may not know.
void Engine::answer(Link& link, const Header& header) {
  if (header.frame != Frame::kAsk && header.frame != Frame::kData && !header.elsewhere()) return;
  auto group = groups_.find(header.group);
  if (group != groups_.end()) {
    if (group->second.told.insert(link.id).second) tell(link, header.group, group->second.broken);
    return;
  }
  Ended& ended = removed_.at(header.group);
  if (!ended.told.insert(link.id).second) return;
  if (ended.why.empty()) tell_left(link, header.group, ended.sequence);
  else tell(link, header.group, ended.why);
}

void Engine::expire() {
  Clock::time_point now = Clock::now();
  for (auto& [key, run] : runs_) {
    if (run->deadline > now) continue;
    std::string waited;
    std::set<int> peers = awaited(*run);
    for (int peer : peers) waited += (waited.empty() ? "" : ", ") + rank_name(run->group, peer);
    const Group& group = groups_.at(run->group);
    std::string known = in_words(suspected(group, run->sequence, peers, run->patience));
    fail_group(run->group,
               describe(*run) + " was not done within the timeout of " + seconds(run->timeout.count()) + " s; it waits for " +
                   (waited.empty() ? "its own messages to be taken" : waited) + (known.empty() ? "" : ": " + known),
               true);
    return;  // runs_ has changed; what else has expired is seen next time round
  }
}

}  // namespace pccl
