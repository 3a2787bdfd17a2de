// Messages of which half is here when their group ends: nothing of them is kept, and so the link that brings them is read on.
#include "peers.hpp"

using namespace pccl;

namespace {

constexpr size_t kMessage = size_t{512} << 10, kMost = 2 * kMessage;

void send_all(int socket, const void* from, size_t bytes) {
  for (const char* at = static_cast<const char*>(from); bytes > 0;) {
    ssize_t sent = send(socket, at, bytes, 0);
    CHECK(sent > 0);  // it is waited for no longer than the socket's timeout
    at += sent;
    bytes -= sent;
  }
}

}  // namespace

void run(int, char**) {
  Engine engine(kMost);
  auto [from, ours] = pair_of_sockets();
  engine.add_incoming(1, from, 0);
  timeval most{2, 0};
  setsockopt(ours, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  std::vector<char> body(kMessage);
  uint64_t groups = 12;
  for (uint64_t group = 1; group <= groups; ++group) {
    engine.add_group(group, {0, 1}, {0, 1}, 0, 30);
    Header header;
    header.frame = Frame::kData;
    bool point = group % 2;
    header.signature = signature(point ? Collective::kPoint : Collective::kAllGather, kMessage / 4);
    header.group = group;
    header.sequence = point ? kPoints + 1 : 1;
    header.bytes = kMessage;
    unsigned char bytes[Header::kBytes];
    header.write(bytes);
    send_all(ours, bytes, sizeof bytes);
    send_all(ours, body.data(), kMessage / 2);
    usleep(20000);
    if (group % 4 < 2) engine.give_up(group, "enough");
    else engine.remove_group(group, "left", 0);
    usleep(20000);
    send_all(ours, body.data(), kMessage / 2);
  }
  close(ours);
  std::printf("%d halves are let go\n", static_cast<int>(groups));
}
