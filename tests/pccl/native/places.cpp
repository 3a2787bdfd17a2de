// Places on a board: taken while peers may read them, and free again when they no longer do.
#include <cstring>

#include "peers.hpp"

using namespace pccl;

namespace {

constexpr size_t kElements = 3 * 64 * 1024;  // a block is large enough for the board, which holds one

// The peers' ends of the engine's links.
int in[3] = {-1, -1, -1}, out[3] = {-1, -1, -1};

Header hear(int peer, std::vector<char>& body) {
  auto take = [&](char* to, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
      ssize_t got = recv(out[peer], to + at, bytes - at, 0);
      CHECK(got > 0);
      at += got;
    }
  };
  unsigned char bytes[Header::kBytes];
  take(reinterpret_cast<char*>(bytes), sizeof bytes);
  Header header;
  CHECK(header.read(bytes).empty());
  body.resize(header.body());
  if (!body.empty()) take(body.data(), body.size());
  return header;
}

void say(int socket, Frame frame, uint64_t group, const std::string& text = "") {
  Header header;
  header.frame = frame;
  header.group = group;
  header.bytes = text.size();
  unsigned char bytes[Header::kBytes];
  header.write(bytes);
  CHECK(send(socket, bytes, sizeof bytes, 0) == sizeof bytes);
  CHECK(text.empty() || send(socket, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
}

// An all-gather of a new group, which the peers give up; how its blocks came.
Frame given_up(Engine& engine, uint64_t group) {
  static std::vector<int32_t> data(kElements / 3), whole(kElements);
  std::vector<char> body;
  std::atomic<bool> done = false;
  engine.add_group(group, {0, 1, 2}, {0, 1, 2}, 0, 30);
  engine.start(group, 1, all_gather(3, 0, 1), signature(Collective::kAllGather, kElements), data.data(), whole.data(), 0,
               [&](const std::string& error) {
                 CHECK(error == "enough");
                 done = true;
               });
  Frame kind = hear(1, body).frame;
  CHECK(hear(2, body).frame == kind);
  say(in[1], Frame::kError, group, "enough");
  while (!done) usleep(100);
  for (int peer : {1, 2}) CHECK(hear(peer, body).frame == Frame::kError);
  return kind;
}

}  // namespace

void run(int, char**) {
  Engine engine;
  engine.set_board(memory_of_link(kElements / 3 * 4 - 4096 - 8192 + 4096));
  for (int peer : {1, 2}) {
    auto [to, theirs] = pair_of_sockets();
    engine.add_outgoing(peer, to, 0, -1, true);
    out[peer] = theirs;
    auto [from, ours] = pair_of_sockets();
    engine.add_incoming(peer, from, 0);
    in[peer] = ours;
  }
  CHECK(given_up(engine, 1) == Frame::kBoard);
  CHECK(given_up(engine, 2) == Frame::kData);  // the place may still be read
  for (int peer : {1, 2}) say(out[peer], Frame::kOver, 1);
  say(out[1], Frame::kOver, 2);
  usleep(100000);
  CHECK(given_up(engine, 3) == Frame::kBoard);
  close(out[1]);
  say(out[2], Frame::kOver, 3);
  usleep(100000);
  std::printf("places are given back\n");
}
