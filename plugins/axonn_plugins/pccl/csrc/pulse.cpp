// Nodes that vanish without a word. A link with nothing under way is kept alive by the kernel, which ends it when its probes are
// not answered. What the kernel gives a quarter of an hour is seen here: bytes that are not acknowledged. Where the peer takes
// none for a while its kernel hardly ever says so, so that the node is then asked anew, by a connection that nobody uses.
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <utility>

#include "engine.hpp"

namespace pccl {
namespace {

constexpr std::chrono::milliseconds kFeel{500};

std::string words(Clock::duration silence) {
  std::ostringstream made;
  made << "its node has not answered for " << std::chrono::duration<double>(silence).count() << " s";
  return made.str();
}

}  // namespace

void Engine::give_up_after(double silence) {
  post([=, this] { silence_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(silence, kMostSeconds))); });
}

void Engine::feel_pulses() {
  Clock::time_point now = Clock::now();
  if (now < felt_ + kFeel) return;
  felt_ = now;
  std::vector<uint64_t> dead;
  for (auto& [id, link] : links_)
    if (link->far && !has_pulse(*link)) dead.push_back(id);
  for (uint64_t id : dead) lose(id, words(silence_));
}

bool Engine::has_pulse(Link& link) {
  int pending = 0;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (ioctl(link.socket, SIOCOUTQ, &pending) != 0 || getsockopt(link.socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return true;
  Clock::time_point now = Clock::now();
  Clock::duration silent = std::chrono::milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
  silent = std::min(silent, now - link.answered);
  if (pending == 0 || silent < silence_ / 2) {
    if (link.knock >= 0) close_socket(std::exchange(link.knock, -1));
    return true;
  }
  // Only who dialled knows where the other listens.
  if (!link.incoming && knock(link)) {
    link.answered = now;
    return true;
  }
  return silent < silence_ || (link.incoming && info.tcpi_unacked == 0);
}

// Whether the peer's node has answered that it is there; it is asked where it was not.
bool Engine::knock(Link& link) {
  if (link.knock < 0) {
    Address there, here;
    bool known = getpeername(link.socket, &there.where.any, &there.bytes) == 0 && getsockname(link.socket, &here.where.any, &here.bytes) == 0;
    int made = known ? socket(there.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
    if (made < 0) return false;
    close_in_child(made);
    link.knock = made;
    here.set_port(0);
    [[maybe_unused]] int bound = bind(made, here.at(), here.bytes);
    if (connect(made, there.at(), there.bytes) != 0 && errno != EINPROGRESS) close_socket(std::exchange(link.knock, -1));
    return false;
  }
  pollfd one{link.knock, POLLOUT, 0};
  if (poll(&one, 1, 0) <= 0) return false;
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(link.knock, SOL_SOCKET, SO_ERROR, &error, &size);
  close_socket(std::exchange(link.knock, -1));
  return error == 0 || error == ECONNREFUSED || error == ECONNRESET;
}

}  // namespace pccl
