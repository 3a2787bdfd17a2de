#include "engine.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace pccl {
namespace {

constexpr uint64_t kWake = 0;           // no link has this number
constexpr int kEvents = 64;
constexpr std::chrono::microseconds kSpin{300};  // most small calls among 4 processes on 2 cores take less
constexpr std::chrono::milliseconds kRest{50};
constexpr double kMostSeconds = 1e9;  // what a clock's nanoseconds can hold

std::string seconds(double value) {
  std::ostringstream made;
  made << value;
  return made.str();
}

}  // namespace

Engine::Engine(size_t most_early) : most_early_(most_early), process_(getpid()) {
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
  if (process_ != getpid()) return;
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
      wait = wait_milliseconds();
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
  return turn;
}

// Whether all that a run sends stays on this node.
bool Engine::near(const Run& run) const {
  auto group = groups_.find(run.group);
  return group != groups_.end() && std::ranges::all_of(run.program->ops, [&](const Op& op) {
    if (op.kind != Kind::kSend) return true;
    auto out = outgoing_.find(group->second.peers[op.peer]);
    return out != outgoing_.end() && links_.at(out->second)->process > 0;
  });
}

void Engine::lead(Begun begun) {
  if (!begun.turn) return;
  // Within a node what is waited for is soon there, and to yield costs less than to sleep and be woken.
  Clock::time_point until = Clock::now() + (near(*begun.run) ? kSpin : kSpin.zero());
  while (!begun.run->over) {
    epoll_event events[kEvents];
    bool spin = Clock::now() < until;
    int count = epoll_wait(epoll_, events, kEvents, spin ? 0 : wait_milliseconds());
    if (spin && count == 0) sched_yield();
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

// What is thrown on the way (there is no memory for a message) ends what is under way, never the process.
void Engine::guarded(const std::function<void()>& step, uint64_t link) {
  try {
    step();
  } catch (const std::exception& error) {
    std::string why = std::string("the engine failed: ") + error.what();
    lose(link, why);
    for (auto& [key, group] : groups_) fail_group(key, "rank " + std::to_string(group.ranks[group.rank]) + ": " + why, true);
  }
}

int Engine::wait_milliseconds() {
  if (runs_.empty()) return -1;
  Clock::time_point first = Clock::time_point::max();
  for (auto& [key, run] : runs_) first = std::min(first, run->deadline);
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(first - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left + 1, 0, 60000));
}

void Engine::expire() {
  Clock::time_point now = Clock::now();
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

void Engine::add_outgoing(int peer, int socket, pid_t process) {
  {
    std::lock_guard lock(mutex_);
    linked_.insert(peer);
  }
  add_link(peer, socket, process, false);
}

void Engine::add_incoming(int peer, int socket, pid_t process) { add_link(peer, socket, process, true); }

void Engine::add_link(int peer, int socket, pid_t process, bool incoming) {
  close_in_child(socket);
  post([=, this] {
    auto link = std::make_unique<Link>();
    link->id = next_link_++;
    link->peer = peer;
    link->socket = socket;
    link->process = process;
    link->incoming = incoming;
    (incoming ? incoming_ : outgoing_)[peer] = link->id;
    lost_.erase(peer);
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    watch(*link, EPOLL_CTL_ADD);
    links_[link->id] = std::move(link);
  });
}

void Engine::check_process() const {
  if (process_ != getpid())
    throw std::runtime_error("pccl: this process was forked from the one that made the process group; make a group of its own");
}

bool Engine::linked(int peer) {
  std::lock_guard lock(mutex_);
  return linked_.contains(peer);
}

void Engine::watch(const Link& link, int change) {
  epoll_event event{(link.paused ? 0u : EPOLLIN) | (link.wants_write ? EPOLLOUT : 0u), {.u64 = link.id}};
  epoll_ctl(epoll_, change, link.socket, &event);
}

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
    broken_early_.erase(key);
    removed_.insert(key);
    drop_early(key, std::nullopt);
  });
}

Begun Engine::start(uint64_t group, uint64_t sequence, std::shared_ptr<const Program> program, Signature signature,
                   void* input, void* output, double timeout, Done done, bool here) {
  check_process();
  auto run = std::make_shared<Run>();
  run->group = group;
  run->sequence = sequence;
  run->program = std::move(program);
  run->signature = signature;
  run->timeout = std::chrono::duration<double>(std::min(timeout, kMostSeconds));
  run->done = std::move(done);
  Buffers& buffers = run->buffers;
  buffers.input = static_cast<char*>(input);
  buffers.output = static_cast<char*>(output);
  buffers.whole_input = signature.collective != Collective::kAllGather;
  buffers.whole_output = signature.collective != Collective::kReduceScatter;
  buffers.element = type_bytes(signature.type);
  size_t blocks = run->program->size, each = signature.elements / blocks, longer = signature.elements % blocks;
  for (size_t block = 0; block <= blocks; ++block) buffers.starts.push_back(block * each + std::min(block, longer));
  buffers.longest = each + (longer > 0);
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
  run->deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(run->timeout);
  newest_[run->group] = std::max(newest_[run->group], run->sequence);
  runs_[{run->group, run->sequence}] = run;
  for (auto& [key, early] : early_) {
    if (std::get<0>(key) != run->group || std::get<1>(key) != run->sequence) continue;
    if (!(early.header.signature == run->signature))
      return fail_group(run->group, mismatch(*run, std::get<2>(key), early.header), true);
  }
  run->work.resize(run->program->work_slots * run->buffers.longest * run->buffers.element);
  run->buffers.work = run->work.data();
  const auto& ops = run->program->ops;
  run->left = ops.size();
  run->finished.resize(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    run->waits.push_back(ops[i].waits);
    if (ops[i].waits == 0) run->ready.push_back(static_cast<int32_t>(i));
  }
  advance(*run);
}

// The group is out of order for good: its ranks no longer agree on what they have done.
void Engine::fail_group(uint64_t key, const std::string& why, bool tell) {
  auto found = groups_.find(key);
  if (found == groups_.end() || !found->second.broken.empty()) return;
  found->second.broken = why;
  std::vector<std::shared_ptr<Run>> failed;
  for (auto at = runs_.lower_bound({key, 0}); at != runs_.end() && at->first.first == key; ++at) failed.push_back(at->second);
  for (auto& run : failed) forget(*run);
  if (tell) {
    std::string text = why.substr(0, Header::kMostText);
    for (int peer : found->second.peers) {
      auto out = outgoing_.find(peer);
      if (out == outgoing_.end()) continue;
      Message message;
      message.owned.assign(text.begin(), text.end());
      Header header;
      header.frame = Frame::kError;
      header.group = key;
      header.bytes = text.size();
      header.write(message.header);
      Link& link = *links_.at(out->second);
      link.queue.push_back(std::move(message));
      Message& last = link.queue.back();
      last.body = Cursor({{last.owned.data(), last.owned.size()}});
      flush(link);
    }
  }
  for (auto& run : failed) run->done(why);
}

// Nothing may touch the run's memory from here on.
void Engine::forget(Run& run) {
  run.over = true;
  std::erase_if(posted_, [&](auto& item) { return item.second.run == &run; });
  std::erase_if(unread_, [&](auto& item) { return item.second.run == &run; });
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
      begun.body = begun.owned.empty() ? Cursor() : Cursor({{begun.owned.data(), begun.owned.size()}});
    }
  }
  auto found = runs_.find({run.group, run.sequence});
  past_.push_back(std::move(found->second));
  runs_.erase(found);
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
