// Where a process listens, in IPv4 or IPv6, and the sockets between two of them.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <string>

namespace pccl {

struct Address {
  // None yet.
  Address() : bytes(sizeof where) {}
  // "10.0.0.1", "fd00::1", or "fe80::1%eth0" with the interface of this node's. Throws where it is none.
  Address(const std::string& host, int port);
  // Where a name of a node's own is listened at.
  explicit Address(const std::string& name);

  int family() const { return where.any.sa_family; }
  const sockaddr* at() const { return &where.any; }
  // Which of this node's interfaces an address that means something on one network only is of.
  void take_zone(const Address& own);
  void set_port(int port) { (family() == AF_INET6 ? where.six.sin6_port : where.four.sin_port) = htons(static_cast<uint16_t>(port)); }
  int port() const { return ntohs(family() == AF_INET6 ? where.six.sin6_port : where.four.sin_port); }

  union {
    sockaddr any;
    sockaddr_in four;
    sockaddr_in6 six;
    sockaddr_un name;
  } where{};
  socklen_t bytes;
};

// That the kernel notices within so many seconds that the other end's node answers no more, while nothing is to be sent.
void keep_alive(int socket, double seconds);
// Whether a socket's other end may be on another node.
bool is_far(int socket);
// Whether an error says that the other end's node does not answer.
bool no_answer(int error);
// What is said of a link that ended with an error.
std::string broken_link(int error);

}  // namespace pccl
