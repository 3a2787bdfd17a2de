// Who is waited for: what ranks ask each other when a call takes long, and ranks that have left a group.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "engine.hpp"

namespace pccl {
namespace {

constexpr size_t kFewAsked = 8;   // at a time, and as many others in turn
constexpr size_t kMostNamed = 8;  // in an error, of those that a call waits for
constexpr int kFresh = 3;         // times a call's patience for which an answer counts

std::string seconds(double value) {
  std::ostringstream made;
  made << value;
  return made.str();
}

}  // namespace

// Where a call takes long, some of those that it waits for are asked.
void Engine::ask() {
  Clock::time_point now = Clock::now();
  std::vector<std::shared_ptr<Run>> late;
  for (auto& [key, run] : runs_)
    if (run->asks <= now) late.push_back(run);
  for (auto& run : late) {
    if (run->over) continue;  // to ask may end runs
    run->asks = now + run->patience;
    ask(run->group, run->sequence, run->signature, next_asked(*run));
  }
}

// Those whose first messages are missing come first: others may only wait for them. All have their turn.
std::vector<int> Engine::next_asked(Run& run) const {
  const Group& group = groups_.at(run.group);
  int size = static_cast<int>(group.peers.size());
  std::vector<std::tuple<uint32_t, int, int>> order;  // neighbours first, so that not all ask the same ones
  for (auto [peer, missing] : awaited(run)) {
    auto place = group.places.find(peer);
    if (place != group.places.end()) order.emplace_back(missing, (place->second - group.rank + size) % size, peer);
  }
  std::ranges::sort(order);
  size_t others = order.size() - std::min(order.size(), kFewAsked), turn = run.inquiries++ * kFewAsked;
  std::vector<int> made;
  for (size_t at = 0; at < order.size() && at < kFewAsked; ++at) made.push_back(std::get<2>(order[at]));
  for (size_t at = 0; at < std::min(others, kFewAsked); ++at) made.push_back(std::get<2>(order[kFewAsked + (turn + at) % others]));
  return made;
}

void Engine::ask(uint64_t key, uint64_t sequence, const Signature& signature, const std::vector<int>& peers) {
  Header header;
  header.frame = Frame::kAsk;
  header.signature = signature;
  header.group = key;
  header.sequence = sequence;
  for (int peer : peers) {
    auto group = groups_.find(key);
    if (group == groups_.end() || !group->second.broken.empty()) return;
    State& state = group->second.states[peer];
    if (!state.asked) state.asked = Clock::now();
    header.tag = group->second.refused == sequence;  // of this rank's own, too, which made the next one in its place
    const auto& links = outgoing_.contains(peer) ? outgoing_ : incoming_;
    auto known = links.find(peer);
    if (known == links.end()) {
      if (group->second.reach && !lost_.contains(peer)) group->second.reach(peer);
      continue;
    }
    Message message;
    header.write(message.header);
    ++questions_;
    dispatch(*links_.at(known->second), std::move(message));
  }
}

// Whom a run waits for.
Engine::Awaited Engine::awaited(const Run& run) const {
  Awaited peers;
  auto add = [&](int peer, uint32_t missing) {
    uint32_t& first = peers.try_emplace(peer, missing).first->second;
    first = std::min(first, missing);
  };
  for (auto* list : {&posted_, &unread_})
    for (auto& [at, posted] : *list)
      if (posted.run == &run) add(std::get<2>(at), std::get<3>(at));
  if (run.sits)
    for (int peer : missing(run)) add(peer, 0);
  auto wanted = run.point() ? wanted_.find({run.group, run.program->ops[0].tag}) : wanted_.end();
  if (wanted != wanted_.end() && std::ranges::find(wanted->second, &run) != wanted->second.end()) {
    const Group& group = groups_.at(run.group);
    for (int peer : group.peers)
      if (peer != group.peers[group.rank] && may_bring(run, peer)) add(peer, 0);
  }
  for (auto& [id, link] : links_) {
    bool waits = link->sink.run == &run;
    for (const Message& message : link->queue) waits |= message.run == &run;
    if (waits) add(link->peer, 0);
  }
  return peers;
}

Engine::Suspects Engine::suspected(const Group& group, uint64_t sequence, const Awaited& peers, Clock::duration patience) const {
  Suspects made;
  for (auto [peer, missing] : peers) {
    auto state = group.states.find(peer);
    auto place = group.places.find(peer);
    if (state == group.states.end() || place == group.places.end()) continue;
    uint32_t rank = group.ranks[place->second];
    if (state->second.asked && Clock::now() - *state->second.asked > patience * 3 / 4) {
      made.push_back({rank, kSilent, 0});
    } else if (state->second.known && Clock::now() < state->second.heard + kFresh * patience) {
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
  auto add = [&](uint64_t other, uint64_t sequence, const Awaited& peers, Clock::duration patience, Clock::time_point began) {
    auto group = groups_.find(other);
    if (other == key || group == groups_.end() || Clock::now() < began + patience * 3 / 2) return;
    for (Suspect& found : suspected(group->second, sequence, peers, patience)) {
      found.how |= kElsewhere;
      made.push_back(found);
    }
  };
  for (auto& [at, run] : runs_) add(at.first, at.second, awaited(*run), run->patience, run->began);
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
  if (found == groups_.end()) return;
  const Group& group = found->second;
  uint64_t newest = newest_[header.group];
  bool point = header.sequence >= kPoints;  // whose number means nothing here
  auto run = point ? runs_.end() : runs_.find({header.group, header.sequence});
  if (run != runs_.end() && !(run->second->signature == header.signature))
    return fail_group(header.group, mismatch(*run->second, link.peer, header), true);
  bool others = header.tag == 0;  // who was refused the same call is in the next one, as this rank may be soon
  if (!point && others && newest < header.sequence && group.refused == header.sequence && Clock::now() > group.refused_at + kPatience) {
    std::string why = "rank " + std::to_string(group.ranks[group.rank]) + ": call " + std::to_string(header.sequence) +
                      " of its group was refused: " + group.refusal;
    return fail_group(header.group, why, true);
  }
  Suspects suspects = suspected(header.group, header.sequence);
  tell(link, Frame::kState, header.group, newest, suspects.data(), suspects.size() * sizeof(Suspect));
  found->second.askers[link.id] = {header.sequence, Clock::now(), std::move(suspects)};
}

// Whom a peer waits for in the end that waits for this rank in a call.
Engine::Suspects Engine::suspected(uint64_t key, uint64_t sequence) {
  const Group& group = groups_.at(key);
  bool point = sequence >= kPoints;
  Suspects made;
  for (auto run = runs_.lower_bound({key, 0}); run != runs_.end() && run->first.first == key && made.empty(); ++run)
    if (point || run->second->point() || run->first.second <= sequence)
      made = suspected(group, run->first.second, awaited(*run->second), run->second->patience);
  if (made.empty() && newest_[key] < sequence) made = elsewhere(key);
  return made;
}

void Engine::on_state(const Link& link, const Header& header, const std::vector<char>& body) {
  auto found = groups_.find(header.group);
  if (found == groups_.end()) return;
  static_assert(sizeof(Suspect) == Header::kRowBytes);
  State& state = found->second.states[link.peer];
  Suspects before = std::move(state.suspects);
  state.known = true;
  state.heard = Clock::now();
  state.asked.reset();
  state.sequence = header.sequence;
  state.suspects.resize(body.size() / sizeof(Suspect));
  if (!body.empty()) std::memcpy(state.suspects.data(), body.data(), body.size());
  // Who asked hears at once what is new, and need not ask again as often as there are ranks in between.
  if (state.suspects == before) return;
  for (auto& [id, asker] : found->second.askers) {
    auto asking = links_.find(id);
    if (asking == links_.end() || Clock::now() > asker.asked + kFresh * kPatience) continue;
    Suspects suspects = suspected(header.group, asker.sequence);
    if (suspects.empty() || suspects == asker.told) continue;
    asker.told = suspects;
    tell(*asking->second, Frame::kState, header.group, newest_[header.group], suspects.data(), suspects.size() * sizeof(Suspect));
  }
}

// A peer has left the group: calls after its last one cannot be done.
void Engine::on_left(uint64_t key, int peer, const Departure& left) {
  auto found = groups_.find(key);
  if (found == groups_.end()) {
    if (left_early_.size() >= kMostBroken) return;
    Departure& known = left_early_[key].emplace(peer, left).first->second;
    known.sends |= left.sends;
    known.receives |= left.receives;
    return;
  }
  Departure& known = found->second.left.emplace(peer, left).first->second;
  known.sends |= left.sends;
  known.receives |= left.receives;
  uint64_t sequence = left.sequence;
  std::string gone = rank_name(key, peer) + " has left the group after call " + std::to_string(sequence) + " of it (" +
                     (left.why.empty() ? "destroy_process_group, or its end" : "it was told before: " + left.why) + ")";
  for (auto run = runs_.upper_bound({key, sequence}); run != runs_.end() && run->first.first == key; ++run)
    if (in_vain(*run->second, peer, known)) return fail_group(key, describe(*run->second) + " cannot be done: " + gone, true);
}

// Whether a run cannot be done as a peer has left its group.
bool Engine::in_vain(const Run& run, int peer, const Departure& left) const {
  if (!run.point()) return run.sequence > left.sequence;
  const Op& op = run.program->ops[0];
  const Group& group = groups_.at(run.group);
  if (op.peer < 0)
    return std::ranges::all_of(group.peers, [&](int other) {
      auto gone = group.left.find(other);
      return other == group.peers[group.rank] || (gone != group.left.end() && gone->second.sends);
    });
  return group.peers[op.peer] == peer && (op.kind == Kind::kSend ? left.receives : left.sends);
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
    Awaited peers = awaited(*run);
    size_t named = 0;
    for (auto [peer, missing] : peers)
      if (++named <= kMostNamed) waited += (waited.empty() ? "" : ", ") + rank_name(run->group, peer);
    if (named > kMostNamed) waited += " and " + std::to_string(named - kMostNamed) + " more";
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
