#include "address.hpp"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace pccl {
namespace {

constexpr int kProbes = 3;  // that are not answered

}  // namespace

Address::Address(const std::string& host, int port) {
  std::string number = host.substr(0, host.find('%'));
  if (inet_pton(AF_INET, number.c_str(), &where.four.sin_addr) == 1) {
    where.four.sin_family = AF_INET;
    where.four.sin_port = htons(static_cast<uint16_t>(port));
    bytes = sizeof where.four;
  } else if (inet_pton(AF_INET6, number.c_str(), &where.six.sin6_addr) == 1) {
    where.six.sin6_family = AF_INET6;
    where.six.sin6_port = htons(static_cast<uint16_t>(port));
    if (number != host) where.six.sin6_scope_id = if_nametoindex(host.c_str() + number.size() + 1);
    bytes = sizeof where.six;
  } else {
    throw std::runtime_error("\"" + host + "\" is no address");
  }
}

Address::Address(const std::string& name) {
  where.name.sun_family = AF_UNIX;
  size_t length = std::min(name.size(), sizeof where.name.sun_path - 1);
  std::memcpy(where.name.sun_path + 1, name.data(), length);  // after a zero: such a name is in no file system
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

void Address::take_zone(const Address& own) {
  if (family() != AF_INET6 || !IN6_IS_ADDR_LINKLOCAL(&where.six.sin6_addr)) return;
  where.six.sin6_scope_id = own.where.six.sin6_scope_id;
}

void keep_alive(int socket, double seconds) {
  int on = 1, probes = kProbes, between = static_cast<int>(std::clamp(std::ceil(seconds / (kProbes + 1)), 1.0, 32767.0));
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &between, sizeof between);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

bool is_far(int socket) {
  int family = AF_UNIX;
  socklen_t size = sizeof family;
  getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size);
  return family == AF_INET || family == AF_INET6;
}

bool no_answer(int error) { return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH; }

std::string broken_link(int error) {
  return std::string(no_answer(error) ? "its node does not answer: " : "its link broke: ") + std::strerror(error);
}

}  // namespace pccl
