// The side that dials. It waits in the thread that asks for a link, which must not hold the interpreter's lock.
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "doors.hpp"
#include "reading.hpp"

namespace pccl {
namespace {

constexpr size_t kSharedBytes = 4096 + 8192 + (size_t{1} << 18);  // counts, answers, messages
constexpr std::chrono::milliseconds kLook{100};                   // until it looks whether the group is in order still
constexpr std::chrono::milliseconds kAgain{50};
constexpr std::chrono::seconds kOneOfSeveral{3};  // for an address, where the peer has others
constexpr int kTries = 6;                         // of a peer that hangs up: it may have had too many handshakes at a time

std::string place_of(const Doors::Peer& peer) {
  if (peer.addresses.empty()) return "the process";
  return "the process at " + peer.addresses[0].first + " port " + std::to_string(peer.addresses[0].second);
}

// It was there, and ended the connection before it answered.
struct HungUp : NoLink {
  using NoLink::NoLink;
};

struct Socket {
  int number = -1;
  ~Socket() {
    if (number >= 0) close_socket(number);
  }
  int release() { return std::exchange(number, -1); }
};

}  // namespace

Doors::Joined Doors::joined(uint64_t group) {
  std::lock_guard lock(mutex_);
  return groups_.at(group);
}

void Doors::connect(uint64_t group, const Peer& peer, double timeout) {
  int number = this->number(peer.identity);
  auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(timeout, kMostSeconds)));
  {
    std::unique_lock lock(mutex_);
    connected_.wait(lock, [&] { return !connecting_.contains(number); });
    if (engine_->linked(number)) return;
    connecting_.insert(number);
  }
  struct Over {
    Doors& doors;
    int number;
    ~Over() {
      std::lock_guard lock(doors.mutex_);
      doors.connecting_.erase(number);
      doors.connected_.notify_all();
    }
  } over{*this, number};
  for (int tries = 1;; ++tries) {
    try {
      return introduce(dial(group, peer, until), group, peer, number, until);
    } catch (const HungUp& error) {
      auto pause = kAgain * (1 << (tries - 1));
      if (error.gone || tries == kTries || Clock::now() + pause > until)
        throw NoLink(place_of(peer) + " did not answer: " + error.what(), error.gone);
      std::this_thread::sleep_for(pause);
    }
  }
}

bool Doors::gone(const Peer& peer, double timeout) {
  try {
    close_socket(dial(0, peer, Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout))));
  } catch (const NoLink& error) {
    return error.gone;
  }
  return false;
}

// A connection to a peer.
int Doors::dial(uint64_t group, const Peer& peer, Clock::time_point until) {
  struct Way {
    Address to, from;
  };
  std::vector<Way> ways;
  if (peer.near) ways.push_back({Address(peer.name), Address()});
  else
    for (auto& [host, port] : peer.addresses)
      for (Address own : own_) {
        Address to(host, port);
        if (to.family() != own.family()) continue;
        to.take_zone(own);
        own.set_port(0);
        ways.push_back({to, own});
      }
  std::string here = addresses_.empty() ? "this node" : addresses_[0].first;
  if (ways.empty())
    throw NoLink(place_of(peer) + " cannot be reached from " + here + ": one speaks IPv4 only and the other IPv6; name interfaces "
                 "in AXONN_PCCL_INTERFACES that have addresses of one kind on all nodes");
  // What has been listened at since before it was known is either answered or refused; who does neither is not there.
  auto silent = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(silence_));
  auto last = peer.near ? until : std::min(until, silent);
  while (true) {
    int error = 0;
    bool refused = false;
    for (const Way& way : ways) {
      Socket made{socket(way.to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
      if (made.number < 0) throw NoLink(std::string("no socket could be had: ") + std::strerror(errno));
      close_in_child(made.number);
      if (!peer.near) {
        int on = 1;
        setsockopt(made.number, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        keep_alive(made.number, silence_);
        // Where that address is not there any more, from another.
        [[maybe_unused]] int bound = bind(made.number, way.from.at(), way.from.bytes);
      }
      if (::connect(made.number, way.to.at(), way.to.bytes) == 0) return made.release();
      error = errno;
      if (error == EINPROGRESS) {
        try {
          await(made.number, POLLOUT, group, ways.size() == 1 ? last : std::min(last, Clock::now() + kOneOfSeveral));
          socklen_t size = sizeof error;
          getsockopt(made.number, SOL_SOCKET, SO_ERROR, &error, &size);
        } catch (const HungUp&) {
          error = ETIMEDOUT;
        }
        if (error == 0) return made.release();
      }
      refused |= error == ECONNREFUSED;
    }
    // Members listen before they are known: one that refuses has ended.
    if (refused || Clock::now() + kAgain > last)
      throw NoLink(place_of(peer) + " cannot be reached from " + here + ": " + std::strerror(error), refused || last == silent);
    if (error != ETIMEDOUT) std::this_thread::sleep_for(kAgain);
    if (std::string why = engine_->broken(group); !why.empty()) throw NoLink(why);
  }
}

// Until a socket is ready; HungUp where it is not in time.
void Doors::await(int socket, short events, uint64_t group, Clock::time_point until) {
  while (true) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    pollfd one{socket, events, 0};
    int ready = poll(&one, 1, static_cast<int>(std::clamp<long long>(std::min(left, kLook).count() + 1, 0, 1000)));
    if (ready > 0) return;
    if (std::string why = engine_->broken(group); !why.empty()) throw NoLink(why);
    if (left.count() <= 0) throw HungUp("it was silent until the time was over");
  }
}

void Doors::receive_all(int socket, void* to, size_t bytes, uint64_t group, Clock::time_point until) {
  for (char* at = static_cast<char*>(to); bytes > 0;) {
    await(socket, POLLIN, group, until);
    ssize_t got = recv(socket, at, bytes, 0);
    if (got == 0) throw HungUp("the connection ended");
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got < 0) throw HungUp(broken_link(errno), no_answer(errno));
    at += got;
    bytes -= got;
  }
}

// So little that it goes at once.
void Doors::send_all(int socket, const void* from, size_t bytes, const std::vector<int>& handed) {
  iovec part{const_cast<void*>(from), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))]{};
  msghdr block{};
  block.msg_iov = &part;
  block.msg_iovlen = 1;
  if (!handed.empty()) {
    block.msg_control = control;
    block.msg_controllen = CMSG_SPACE(handed.size() * sizeof(int));
    cmsghdr* head = CMSG_FIRSTHDR(&block);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(handed.size() * sizeof(int));
    std::memcpy(CMSG_DATA(head), handed.data(), handed.size() * sizeof(int));
  }
  if (sendmsg(socket, &block, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes)) throw HungUp(broken_link(errno));
}

void Doors::introduce(int connection, uint64_t group, const Peer& peer, int number, Clock::time_point until) {
  Socket made{connection};
  const std::string secret = joined(group).secret;
  Hello hello{};
  std::memcpy(hello.magic.data(), Hello::kMagic, hello.magic.size());
  std::memcpy(hello.group.data(), &group, hello.group.size());
  hello.identity = identity_;
  randomize(hello.nonce.data(), hello.nonce.size());
  send_all(connection, &hello, sizeof hello, {});
  Answer answer;
  receive_all(connection, &answer, sizeof answer, group, until);
  Digest right = proof_of(secret, "receiver", hello, peer.identity, answer.nonce);
  if (!same_secret(bytes_of(answer.proof), bytes_of(right))) throw NoLink(place_of(peer) + " does not know the job's secret");
  std::array<char, 8> token;
  randomize(token.data(), token.size());
  Proof proof{proof_of(secret, "sender", hello, peer.identity, answer.nonce), reinterpret_cast<uintptr_t>(token.data()), token};
  if (peer.near && lets_read_) let_read(process_of(connection));
  Socket memory;
  std::vector<int> handed;
  if (peer.near && (memory.number = sealed_memory(kSharedBytes)) >= 0) {
    handed.push_back(memory.number);
    if (board_ >= 0) handed.push_back(board_);
  }
  unsigned char ways = 0;
  try {
    send_all(connection, &proof, sizeof proof, handed);
    receive_all(connection, &ways, 1, group, until);
  } catch (const HungUp& error) {
    throw NoLink(place_of(peer) + " did not answer: " + error.what(), error.gone);
  }
  engine_->add_outgoing(number, made.release(), ways & kRead ? 1 : 0, ways & kShare ? memory.release() : -1, ways & kShow);
}

}  // namespace pccl
