// A rank of many is lost: who asks whom how often, and what all are told: inquiry RANKS SECONDS
#include <cstring>
#include <mutex>

#include "direct.hpp"
#include "peers.hpp"

using namespace pccl;

namespace {

// One engine whose peers are stand-ins: all but the lost one have sent their part of an all-to-all, and answer.
void all_to_all_without_one(int size, double timeout) {
  int lost = size / 2;
  Engine engine;
  std::vector<int> ranks(size), out(size, -1), in(size, -1);
  for (int rank = 0; rank < size; ++rank) ranks[rank] = rank;
  for (int peer = 1; peer < size; ++peer) {
    auto [to, theirs] = pair_of_sockets();
    engine.add_outgoing(peer, to, 0);
    out[peer] = theirs;
    auto [from, ours] = pair_of_sockets();
    engine.add_incoming(peer, from, 0);
    in[peer] = ours;
  }
  engine.add_group(3, ranks, ranks, 0, timeout);
  std::vector<int32_t> data(size), result(size);
  std::vector<Piece> inputs, outputs;
  for (int rank = 0; rank < size; ++rank) {
    inputs.push_back({reinterpret_cast<char*>(&data[rank]), 4});
    outputs.push_back({reinterpret_cast<char*>(&result[rank]), 4});
  }
  std::string error;
  std::atomic<bool> done = false;
  Signature kind = signature(Collective::kAllToAll, size);
  engine.start(3, 1, all_to_all(size, 0), kind, inputs, outputs, 0, [&](const std::string& why) {
    error = why;
    done = true;
  });
  auto say = [&](int peer, Frame frame, uint64_t bytes) {
    Header header;
    header.frame = frame;
    header.group = 3;
    header.sequence = 1;
    header.signature = kind;
    header.bytes = bytes;
    unsigned char text[Header::kBytes + 4] = {};
    header.write(text);
    CHECK(send(in[peer], text, Header::kBytes + bytes, 0) == static_cast<ssize_t>(Header::kBytes + bytes));
  };
  for (int peer = 1; peer < size; ++peer)
    if (peer != lost) say(peer, Frame::kData, 4);
  std::vector<std::vector<unsigned char>> heard(size);
  uint64_t asked = 0;
  while (!done) {
    usleep(1000);
    for (int peer = 1; peer < size; ++peer) {
      unsigned char bytes[512];
      ssize_t got = recv(out[peer], bytes, sizeof bytes, MSG_DONTWAIT);
      if (got > 0) heard[peer].insert(heard[peer].end(), bytes, bytes + got);
      std::vector<unsigned char>& left = heard[peer];
      while (left.size() >= Header::kBytes) {
        Header header;
        CHECK(header.read(left.data()).empty());
        if (left.size() < Header::kBytes + header.body()) break;
        left.erase(left.begin(), left.begin() + static_cast<ptrdiff_t>(Header::kBytes + header.body()));
        if (header.frame != Frame::kAsk) continue;
        ++asked;
        if (peer != lost) say(peer, Frame::kState, 0);
      }
    }
  }
  std::string name = "rank " + std::to_string(lost);
  CHECK(error.find(": " + name + " does not answer") != std::string::npos && error.size() < 1000);
  CHECK(asked == engine.questions());
  std::printf("%d questions of an all-to-all\n", static_cast<int>(asked));
}

// All ranks of a ring but one make a call: every other one is told which, however far it is.
void ring_without_one(int size, double timeout) {
  int lost = size / 2;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) {
    engines.push_back(std::make_unique<Engine>());
    ranks[rank] = rank;
  }
  for (int rank = 0; rank < size; ++rank) {
    int next = (rank + 1) % size;
    auto [out, in] = pair_of_sockets();
    engines[next]->add_incoming(rank, in, 0);
    engines[rank]->add_outgoing(next, out, 0);
    engines[rank]->add_group(5, ranks, ranks, rank, timeout);
  }
  std::vector<int32_t> output(size);
  std::mutex mutex;
  int left = size - 1, named = 0;
  std::string name = "rank " + std::to_string(lost) + " has not made this call";
  for (int rank = 0; rank < size; ++rank) {
    if (rank == lost) continue;
    Builder made(size, rank, 1);
    int before = (rank + size - 1) % size;
    int come = made.add(Kind::kReceive, before, 0, {{Place::kOutput, before}}, {}, {});
    made.add(Kind::kSend, (rank + 1) % size, 0, {}, {{Place::kOutput, before}}, {come});
    engines[rank]->start(5, 1, made.program(), signature(Collective::kAllGather, size), output.data(), output.data(), 0,
                         [&](const std::string& why) {
                           std::lock_guard lock(mutex);
                           named += why.find(name) != std::string::npos;
                           --left;
                         });
  }
  while (true) {
    usleep(10000);
    std::lock_guard lock(mutex);
    if (left == 0) break;
  }
  uint64_t most = 0;
  for (auto& engine : engines) most = std::max(most, engine->questions());
  engines.clear();
  std::printf("%d questions of a ring, %d of %d named it\n", static_cast<int>(most), named, size - 1);
}

}  // namespace

void run(int, char** arguments) {
  int size = std::atoi(arguments[1]);
  double seconds = std::atof(arguments[2]);
  std::thread ring([&] { ring_without_one(size, seconds); });
  all_to_all_without_one(size, seconds);
  ring.join();
}
