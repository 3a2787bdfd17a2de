// A message that is read from its sender's memory while the sender gives its call up, and uses that memory for something else.
#include "direct.hpp"
#include "peers.hpp"

using namespace pccl;

namespace {

constexpr size_t kElements = size_t{48} << 20;  // enough to be in the middle of them

void say(int socket, Header header, const void* body, size_t bytes) {
  std::vector<char> frame(Header::kBytes + bytes);
  header.write(reinterpret_cast<unsigned char*>(frame.data()));
  std::memcpy(&frame[Header::kBytes], body, bytes);
  CHECK(send(socket, frame.data(), frame.size(), 0) == static_cast<ssize_t>(frame.size()));
}

// Whether the sender had given up before the receive was done, which was told then.
bool given_up_meanwhile(Engine& engine, int socket, uint64_t group) {
  std::vector<int32_t> data(kElements), got(kElements);
  Header header;
  header.frame = Frame::kRemote;
  header.signature = signature(Collective::kPoint, kElements);
  header.group = group;
  header.sequence = kPoints + 1;
  header.bytes = kElements * sizeof(int32_t);
  header.pieces = 1;
  std::atomic<bool> done = false;
  std::string told;
  engine.add_group(group, {0, 1}, {0, 1}, 0, 30);
  engine.start(group, kPoints + 1, point(2, 0, Kind::kReceive, 1, 0), header.signature, {}, {{reinterpret_cast<char*>(got.data()), header.bytes}}, 0,
               [&](const std::string& error) {
                 told = error;
                 done = true;
               });
  uint64_t row[2] = {reinterpret_cast<uintptr_t>(data.data()), header.bytes};
  say(socket, header, row, sizeof row);
  usleep(3000);
  Header enough;
  enough.frame = Frame::kError;
  enough.group = group;
  enough.bytes = 6;
  say(socket, enough, "enough", 6);
  bool before = done;
  while (!done) usleep(100);
  CHECK(before || told == "enough");
  return !before;
}

}  // namespace

void run(int, char**) {
  Engine engine;
  auto [to, theirs] = pair_of_sockets();
  engine.add_outgoing(1, to, 0);
  auto [from, ours] = pair_of_sockets();
  engine.add_incoming(1, from, getpid());
  int found = 0;
  for (uint64_t group = 1; group <= 40 && found < 3; ++group) found += given_up_meanwhile(engine, ours, group);
  close(theirs);
  close(ours);
  std::printf("given up %d times meanwhile\n", found);
}
