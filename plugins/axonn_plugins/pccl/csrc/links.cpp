// Links: where they come from, how they end, and who wakes whom.
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace pccl {

void Engine::set_board(int memory) {
  auto made = std::make_shared<std::unique_ptr<Board>>(std::make_unique<Board>(memory, true));  // which a std::function can hold
  post([=, this] { board_ = std::move(*made); });
}

void Engine::add_outgoing(int peer, int socket, pid_t process, int memory, bool boarded) {
  add_link(peer, socket, process, memory, -1, boarded, false);
}

void Engine::add_incoming(int peer, int socket, pid_t process, int memory, int board) {
  add_link(peer, socket, process, memory, board, false, true);
}

void Engine::add_link(int peer, int socket, pid_t process, int memory, int board, bool boarded, bool incoming) {
  auto made = std::make_shared<Shared>();
  try {
    if (memory >= 0) made->memory = std::make_unique<SharedMemory>(std::exchange(memory, -1), incoming);
    if (board >= 0) made->board = std::make_unique<Board>(std::exchange(board, -1), false);
  } catch (...) {
    if (board >= 0) close(board);
    close(socket);
    throw;
  }
  close_in_child(socket);
  if (!incoming) {
    std::lock_guard lock(mutex_);
    linked_.insert(peer);
  }
  post([=, this] {
    auto link = std::make_unique<Link>();
    link->shared = std::move(made->memory);
    link->board = std::move(made->board);
    link->boarded = boarded;
    link->id = next_link_++;
    link->peer = peer;
    link->socket = socket;
    link->process = process;
    link->incoming = incoming;
    link->far = is_far(socket);
    (incoming ? incoming_ : outgoing_)[peer] = link->id;
    lost_.erase(peer);
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    watch(*link, EPOLL_CTL_ADD);
    if (link->shared) shared_.push_back(link.get());
    links_[link->id] = std::move(link);
  });
}

bool Engine::linked(int peer) {
  std::lock_guard lock(mutex_);
  return linked_.contains(peer);
}

void Engine::watch(const Link& link, int change) {
  bool writes = link.wants_write && !link.shared;
  epoll_event event{(link.paused ? 0u : EPOLLIN) | (writes ? EPOLLOUT : 0u), {.u64 = link.id}};
  epoll_ctl(epoll_, change, link.socket, &event);
}

// Does what can be done where bytes go through memory; whether there was any.
bool Engine::poll_shared() {
  bool found = false;
  for (size_t i = 0; i < shared_.size(); ++i) {
    Link& link = *shared_[i];
    if (!link.busy()) continue;
    found = true;
    guarded([&, id = link.id] {
      if (!link.paused) read(link);
      if (links_.contains(id) && link.wants_write) flush(link);
    }, link.id);
  }
  return found;
}

// Has peers wake who serves, who is to sleep; false where there is something to do already.
bool Engine::rest() {
  if (!ripe_.empty()) return false;
  asleep_ = true;
  for (Link* link : shared_) link->sleep();
  if (poll_desks()) return false;
  return std::ranges::none_of(shared_, [](Link* link) { return link->busy(); });
}

void Engine::awake() {
  if (!asleep_) return;
  asleep_ = false;
  for (Link* link : shared_) link->shared->in().sleep(false);
}

// Links that could not be written to end once it is read what the peer said last.
void Engine::bury() {
  while (!dying_.empty()) {
    uint64_t id = dying_.back();
    dying_.pop_back();
    auto link = links_.find(id);
    if (link == links_.end()) continue;
    std::string why = link->second->broken;
    guarded([this, &link = *link->second, peer = link->second->peer] {
      read(link);
      auto incoming = incoming_.find(peer);
      if (incoming != incoming_.end()) read(*links_.at(incoming->second));
    }, id);
    lose(id, why);
  }
}

void Engine::lose(uint64_t id, const std::string& why) {
  auto found = links_.find(id);
  if (found == links_.end()) return;
  pause(*found->second, false);
  std::unique_ptr<Link> link = std::move(found->second);
  links_.erase(found);
  std::erase(shared_, link.get());
  epoll_ctl(epoll_, EPOLL_CTL_DEL, link->socket, nullptr);
  close_socket(link->socket);
  if (link->knock >= 0) close_socket(link->knock);
  int peer = link->peer;
  if (!link->incoming) settle(peer, std::nullopt);
  auto& known = link->incoming ? incoming_ : outgoing_;
  auto here = known.find(peer);
  if (here != known.end() && here->second == id) {
    known.erase(here);
    std::lock_guard lock(mutex_);
    if (!link->incoming) linked_.erase(peer);
  }
  // What the peer sent before it went is still to be read, where it went in good order.
  bool heard = !link->incoming && incoming_.contains(peer);
  // A newer link in its place has made up for this one.
  if (!heard && !known.contains(peer)) lost_.emplace(peer, why);
  std::vector<std::pair<uint64_t, std::string>> broken;
  auto note = [&](void* of) {
    Run* run = static_cast<Run*>(of);
    if (run != nullptr && !run->over)
      broken.emplace_back(run->group, describe(*run) + " needs " + rank_name(run->group, peer) + ", but " + why);
  };
  for (auto& [key, posted] : posted_)
    if (std::get<2>(key) == peer && !heard) note(posted.run);
  for (auto& [key, posted] : unread_)
    if (std::get<2>(key) == peer) note(posted.run);
  for (auto& [slot, runs] : wanted_)
    for (Run* run : runs)
      if (!heard && may_bring(*run, peer)) note(run);
  for (uint64_t group : busy_desks_) {
    Run* run = desks_.at(group).calls.front();
    if (!heard && std::ranges::count(missing(*run), peer)) note(run);
  }
  note(link->sink.run);
  for (const Message& message : link->queue) note(message.run);
  for (auto& [group, text] : broken) fail_group(group, text, true);
}

}  // namespace pccl
