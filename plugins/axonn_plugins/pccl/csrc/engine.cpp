#include "engine.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace pccl {
namespace {

constexpr int kEvents = 64;
constexpr std::chrono::microseconds kSpin{100};  // since the last message; to be woken takes about as long
constexpr std::chrono::microseconds kLongTurn{500};
constexpr std::chrono::milliseconds kShortPause{2}, kLongPause{128};
constexpr int kLook = 8;  // turns of that after which it looks for other events
constexpr std::chrono::milliseconds kRest{50};

// This process yields from then on; how long it did not, the last time.
std::atomic<Clock::time_point> yields_from{Clock::time_point::min()};
std::atomic<Clock::duration> paused{Clock::duration::zero()};

// Lets others have a turn; false where they kept it for long. Who yields to processes with work of their own waits far longer
// than who sleeps and is woken, so yielding then pauses: briefly after a single event, ever longer where the next try fares alike.
bool give_way(Clock::time_point now) {
  sched_yield();
  Clock::time_point then = Clock::now();
  if (then - now < kLongTurn) return true;
  Clock::duration last = paused;
  paused = then < yields_from.load() + 4 * last ? std::min<Clock::duration>(2 * last, kLongPause) : kShortPause;
  yields_from = then + paused.load();
  return false;
}

}  // namespace

Engine::Engine(size_t most_early) : most_early_(most_early), process_(this_process()) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) throw std::runtime_error("no epoll or eventfd could be had");
  epoll_event event{EPOLLIN, {.u64 = kWake}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  thread_ = std::thread([this] { loop(); });
}

Engine::~Engine() {
  post([this] { stop_ = true; });
  thread_.join();
  for (auto& [id, link] : links_) close_socket(link->socket);
  close(epoll_);
  close(wake_);
}

void Engine::post(std::function<void()> command) {
  // A forked child has no such thread; perhaps the mutex was locked, and to wake would be to wake its parent.
  if (process_ != this_process()) return;
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    if (server_ == Server::kNobody) {
      server_ = Server::kThread;
      thread_serves_.notify_one();
    }
  }
  wake();
}

void Engine::wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(wake_, &one, sizeof one);
}

void Engine::loop() {
  auto mine = [this] { return server_ == Server::kThread; };
  while (true) {
    int wait;
    {
      std::unique_lock lock(mutex_);
      // After a while without calls it serves of itself: links may come and end.
      while (!mine())
        if (!thread_serves_.wait_for(lock, kRest, mine) && server_ == Server::kNobody) server_ = Server::kThread;
    }
    {
      Turn turn(turn_);
      if (stop_) break;
      wait = rest() ? wait_milliseconds() : 0;
    }
    epoll_event events[kEvents];
    int count = epoll_wait(epoll_, events, kEvents, wait);
    {
      std::lock_guard lock(mutex_);
      if (!mine()) continue;  // a caller has taken over, and finds the same events
    }
    Turn turn(turn_);
    serve(events, count);
  }
  std::set<uint64_t> groups;
  for (auto& [key, run] : runs_) groups.insert(key.first);
  for (uint64_t group : groups) fail_group(group, "the process group was destroyed", false);
}

// What was posted, what the links have brought, and what has taken too long.
void Engine::serve(const epoll_event* events, int count) {
  awake();
  for (int i = 0; i < count; ++i) {
    uint64_t posted;
    if (events[i].data.u64 == kWake) [[maybe_unused]] ssize_t got = ::read(wake_, &posted, sizeof posted);
  }
  std::vector<std::function<void()>> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  // Before the events: one may be the end of a link that this rank sends on, whose peer's own link is among the commands.
  for (auto& command : commands) guarded(command, kWake);
  for (int i = 0; i < count; ++i) {
    uint64_t id = events[i].data.u64;
    if (id != kWake) guarded([&, i] { on_event(id, events[i].events); }, id);
  }
  poll_shared();
  poll_desks();
  read_next();
  bury();
  guarded([this] { feel_pulses(); }, kWake);
  guarded([this] { ask(); }, kWake);
  guarded([this] { expire(); }, kWake);
  past_.clear();
}

// The right to serve, where nothing is under way; else nothing.
Turn Engine::take_over() {
  Turn turn(turn_, std::try_to_lock);
  if (!turn || !runs_.empty()) return {};
  bool polls;
  {
    std::lock_guard lock(mutex_);
    if (!commands_.empty()) return {};
    polls = server_ == Server::kThread;
    server_ = Server::kCaller;
  }
  if (polls) wake();  // it would take the events
  awake();
  return turn;
}

// Whether all that a run sends stays on this node.
bool Engine::near(const Run& run) const {
  if (run.sits) return true;
  auto group = groups_.find(run.group);
  return group != groups_.end() && std::ranges::all_of(run.program->ops, [&](const Op& op) {
    if (op.kind != Kind::kSend) return true;
    auto out = outgoing_.find(group->second.peers[op.peer]);
    return out != outgoing_.end() && links_.at(out->second)->shared;
  });
}

void Engine::lead(Begun begun) {
  if (!begun.turn) return;
  // Within a node what is waited for is soon there, and to yield costs less than to sleep and be woken.
  Clock::time_point began = Clock::now(), until = began + kSpin;
  bool spins = began > yields_from.load() && near(*begun.run);
  for (int tries = 0; !begun.run->over; ++tries) {
    if (spins && (poll_shared() | poll_desks() | read_next())) until = Clock::now() + kSpin;
    if (begun.run->over) break;
    Clock::time_point now = Clock::now();
    bool spin = spins && now < until;
    if (spin && (tries + 1) % kLook != 0) {
      spins = give_way(now);
      continue;
    }
    epoll_event events[kEvents];
    int count = epoll_wait(epoll_, events, kEvents, spin || !rest() ? 0 : wait_milliseconds());
    serve(events, count);
  }
  past_.clear();
  std::lock_guard lock(mutex_);
  // While nothing is under way nobody serves: the next caller or command will, or in a while the thread.
  server_ = runs_.empty() && commands_.empty() ? Server::kNobody : Server::kThread;
  if (server_ == Server::kNobody) return;
  thread_serves_.notify_one();
  wake();  // it may still wait for events, and knows nothing of deadlines
}

void Engine::failed(const std::string& why, uint64_t link) {
  // The others are told before they find a link ended.
  for (auto& [key, group] : groups_) fail_group(key, "rank " + std::to_string(group.ranks[group.rank]) + ": " + why, true);
  lose(link, why);
}

int Engine::wait_milliseconds() {
  Clock::time_point first = Clock::now() + kPatience;  // calls may have been left meanwhile
  for (auto& [key, run] : runs_) first = std::min({first, run->deadline, run->asks});
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(first - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left + 1, 0, 60000));
}

void Engine::check_process() const {
  if (process_ != this_process())
    throw std::runtime_error("pccl: this process was forked from the one that made the process group; make a group of its own");
}

}  // namespace pccl
