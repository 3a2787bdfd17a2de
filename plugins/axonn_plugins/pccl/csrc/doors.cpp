// The side that is dialled: one thread answers all handshakes, and waits for none.
#include "doors.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "reading.hpp"

namespace pccl {
namespace {

constexpr size_t kBoardBytes = size_t{1} << 24;  // that processes of a node may read at a time; they take memory when first used
constexpr size_t kMostStrangers = 512;           // handshakes under way; beyond, one has to go
constexpr std::chrono::seconds kSilent{20};      // until it is said what is wanted
constexpr int kBacklog = 1024, kEvents = 64;
constexpr uint64_t kStop = ~uint64_t{0}, kListener = uint64_t{1} << 63;

}  // namespace

int sealed_memory(size_t bytes) {
  int made = memfd_create("axonn-pccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0) return -1;
  bool sealed = fchmod(made, 0600) == 0 && ftruncate(made, static_cast<off_t>(bytes)) == 0 &&
                fcntl(made, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW) == 0;
  if (sealed) return made;
  close(made);
  return -1;
}

Digest proof_of(const std::string& secret, const char* side, const Hello& hello, const Identity& receiver, const Nonce& answered) {
  return hmac(secret, {side, bytes_of(hello.group), bytes_of(hello.identity), bytes_of(receiver), bytes_of(hello.nonce), bytes_of(answered)});
}

Doors::Doors(std::shared_ptr<Engine> engine, std::vector<std::string> hosts, double silence, bool lets_read)
    : engine_(std::move(engine)), silence_(silence), lets_read_(lets_read) {
  engine_->give_up_after(silence);
  randomize(identity_.data(), identity_.size());
  name_ = "axonn-pccl-";
  for (unsigned char byte : identity_)
    for (int half : {byte >> 4, byte & 15}) name_ += "0123456789abcdef"[half];
  board_ = sealed_memory(kBoardBytes);
  if (board_ >= 0) engine_->set_board(dup(board_));
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{EPOLLIN, {.u64 = kStop}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, stop_, &event);
  for (const std::string& host : hosts) {
    listen(Address(host, 0));
    addresses_.emplace_back(host, own_.back().port());
  }
  listen(Address(name_));
  own_.pop_back();
  thread_ = std::thread([this] { loop(); });
}

Doors::~Doors() {
  uint64_t one = 1;
  if (write(stop_, &one, sizeof one) == sizeof one) thread_.join();
  while (!strangers_.empty()) turn_away(strangers_.begin()->first);
  for (int listener : listeners_) close_socket(listener);
  for (int descriptor : {board_, epoll_, stop_}) close(descriptor);
}

void Doors::listen(const Address& address) {
  int made = socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
  if (address.family() == AF_INET6) setsockopt(made, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  Address bound = address;
  if (made < 0 || bind(made, address.at(), address.bytes) != 0 || ::listen(made, kBacklog) != 0 ||
      getsockname(made, &bound.where.any, &bound.bytes) != 0) {
    int error = errno;
    close(made);
    throw std::runtime_error(std::string("it cannot be listened at this node's address: ") + std::strerror(error));
  }
  close_in_child(made);  // which must not seem to listen in its parent's place
  epoll_event event{EPOLLIN, {.u64 = kListener | listeners_.size()}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, made, &event);
  listeners_.push_back(made);
  own_.push_back(bound);
}

uint64_t Doors::join(const std::string& secret, double timeout) {
  Digest digest = sha256({"group", secret});
  uint64_t key;
  std::memcpy(&key, digest.data(), sizeof key);
  auto patience = std::chrono::duration<double>(std::min(timeout, kMostSeconds));
  std::lock_guard lock(mutex_);
  groups_[key] = {secret, std::chrono::duration_cast<Clock::duration>(patience)};
  return key;
}

int Doors::number(const Identity& identity) {
  std::lock_guard lock(mutex_);
  return numbers_.try_emplace(identity, static_cast<int>(numbers_.size())).first->second;
}

void Doors::loop() {
  while (true) {
    auto until = Clock::time_point::max();
    for (auto& [id, stranger] : strangers_) until = std::min(until, stranger.until);
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::min(until, Clock::now())).count();
    epoll_event events[kEvents];
    int count = epoll_wait(epoll_, events, kEvents, static_cast<int>(std::clamp<long long>(left + 1, 0, 60'000)));
    for (int i = 0; i < count; ++i) {
      uint64_t id = events[i].data.u64;
      if (id == kStop) return;
      if (id & kListener) {
        let_in(listeners_[id & ~kListener]);
        continue;
      }
      auto found = strangers_.find(id);
      if (found != strangers_.end() && !hear(found->second)) turn_away(id);
    }
    std::vector<uint64_t> late;
    for (auto& [id, stranger] : strangers_)
      if (stranger.until <= Clock::now()) late.push_back(id);
    for (uint64_t id : late) turn_away(id);
  }
}

void Doors::let_in(int listener) {
  int made = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (made < 0) {
    // There may be no file descriptor to be had just now.
    if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return;
  }
  close_in_child(made);
  if (strangers_.size() >= kMostStrangers) make_room();
  uint64_t id = next_++;
  bool far = is_far(made);
  if (far) keep_alive(made, silence_);
  strangers_.emplace(id, Stranger{made, !far, Clock::now() + kSilent});
  epoll_event event{EPOLLIN, {.u64 = id}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, made, &event);
}

// The oldest that has named no group goes, else the oldest: it may dial again.
void Doors::make_room() {
  auto silent = std::ranges::find_if(strangers_, [](auto& item) { return !item.second.group; });
  turn_away((silent == strangers_.end() ? strangers_.begin() : silent)->first);
}

// Without a word.
void Doors::turn_away(uint64_t id) {
  auto stranger = strangers_.extract(id);
  for (int descriptor : stranger.mapped().handed) close(descriptor);
  // A link that was made of it has the same socket, of which epoll would go on to tell.
  epoll_ctl(epoll_, EPOLL_CTL_DEL, stranger.mapped().socket, nullptr);
  close_socket(stranger.mapped().socket);
}

// Takes what has come; whether there is more to wait for.
bool Doors::hear(Stranger& stranger) {
  while (true) {
    size_t wanted = stranger.group ? sizeof(Proof) : sizeof(Hello);
    char bytes[std::max(sizeof(Proof), sizeof(Hello))];
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
    iovec part{bytes, wanted - stranger.got.size()};
    msghdr block{};
    block.msg_iov = &part;
    block.msg_iovlen = 1;
    if (stranger.near) block.msg_control = control, block.msg_controllen = sizeof control;
    ssize_t got = recvmsg(stranger.socket, &block, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) return false;
    for (cmsghdr* part = CMSG_FIRSTHDR(&block); part; part = CMSG_NXTHDR(&block, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
        int descriptor;
        std::memcpy(&descriptor, CMSG_DATA(part) + at, sizeof descriptor);
        stranger.handed.push_back(descriptor);
      }
    }
    stranger.got.append(bytes, got);
    if (stranger.handed.size() > 2) return false;
    if (stranger.got.size() < wanted) continue;
    if (stranger.group) {
      on_proof(stranger);
      return false;
    }
    if (!on_hello(stranger)) return false;
  }
}

bool Doors::on_hello(Stranger& stranger) {
  std::memcpy(&stranger.hello, stranger.got.data(), sizeof stranger.hello);
  stranger.got.clear();
  const Hello& hello = stranger.hello;
  if (bytes_of(hello.magic) != Hello::kMagic) return false;
  uint64_t key;
  std::memcpy(&key, hello.group.data(), sizeof key);
  {
    std::lock_guard lock(mutex_);
    auto group = groups_.find(key);
    if (group == groups_.end()) return false;
    stranger.group = group->second;
  }
  stranger.until = Clock::now() + stranger.group->timeout;
  randomize(stranger.nonce.data(), stranger.nonce.size());
  Answer answer{stranger.nonce, proof_of(stranger.group->secret, "receiver", hello, identity_, stranger.nonce)};
  return send(stranger.socket, &answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer;
}

void Doors::on_proof(Stranger& stranger) {
  Proof proof;
  std::memcpy(&proof, stranger.got.data(), sizeof proof);
  Digest right = proof_of(stranger.group->secret, "sender", stranger.hello, identity_, stranger.nonce);
  if (!same_secret(bytes_of(proof.proof), bytes_of(right))) return;
  pid_t process = stranger.near ? process_of(stranger.socket) : 0;
  if (!can_read(process, proof.address, bytes_of(proof.token))) process = 0;
  size_t handed = stranger.handed.size();
  auto take = [&](size_t place) { return handed > place ? std::exchange(stranger.handed[place], -1) : -1; };
  int memory = take(0), board = take(1);
  std::erase(stranger.handed, -1);
  auto ways = static_cast<unsigned char>((process ? kRead : 0) | (handed > 0 ? kShare : 0) | (handed > 1 ? kShow : 0));
  int link = dup(stranger.socket);
  if (link < 0) {
    for (int descriptor : {memory, board})
      if (descriptor >= 0) close(descriptor);
    return;
  }
  try {
    // The engine listens before the other side may send.
    engine_->add_incoming(number(stranger.hello.identity), link, process, memory, board);
  } catch (const std::exception&) {
    return;
  }
  [[maybe_unused]] ssize_t sent = send(stranger.socket, &ways, 1, MSG_NOSIGNAL);
}

}  // namespace pccl
