// What the native tests share: programs, pairs of sockets, and waiting.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace pccl {

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
      std::abort();                                                             \
    }                                                                           \
  } while (false)

inline std::pair<int, int> pair_of_sockets() {
  int both[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
  return {both[0], both[1]};
}

// As doors.cpp makes it.
inline int memory_of_link(off_t messages) {
  int made = memfd_create("peers", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(made >= 0 && ftruncate(made, 4096 + 8192 + messages) == 0);
  CHECK(fcntl(made, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  return made;
}

// Lists as plugins/axonn_plugins/pccl/program.py flattens them.
struct Builder {
  int32_t size, rank, chunks;
  std::vector<int32_t> ops, spans, after;
  std::vector<int32_t> sent, received;

  Builder(int32_t size, int32_t rank, int32_t chunks)
      : size(size), rank(rank), chunks(chunks), sent(size), received(size) {}

  using Block = std::pair<Place, int32_t>;  // in its own slot, or slot 0 where `block` is negative
  int32_t add(Kind kind, int32_t peer, int32_t chunk, std::vector<Block> to, std::vector<Block> from, std::vector<int32_t> waits) {
    int32_t tag = kind == Kind::kCopy ? 0 : (kind == Kind::kSend ? sent : received)[peer]++;
    int32_t first = static_cast<int32_t>(spans.size() / 4);
    for (auto* list : {&to, &from})
      for (auto [place, block] : *list) {
        bool own = block < 0;
        for (int32_t value : {static_cast<int32_t>(place), own ? 0 : block, own ? -1 - block : block, 1}) spans.push_back(value);
      }
    auto number = [](auto count) { return static_cast<int32_t>(count); };
    for (int32_t value : {number(kind), peer, tag, chunk, first, number(to.size()), first + number(to.size()),
                          number(from.size()), number(waits.size())})
      ops.push_back(value);
    after.insert(after.end(), waits.begin(), waits.end());
    return number(ops.size() / 9) - 1;
  }

  std::shared_ptr<const Program> program() const {
    return std::make_shared<Program>(Program::parse(size, rank, chunks, 0, 7, ops, spans, after));
  }
};

// Everyone sends its block to everyone.
inline std::shared_ptr<const Program> all_gather(int32_t size, int32_t rank, int32_t chunks) {
  Builder made(size, rank, chunks);
  made.add(Kind::kCopy, -1, -1, {{Place::kOutput, rank}}, {{Place::kInput, -1 - rank}}, {});
  for (int32_t chunk = 0; chunk < chunks; ++chunk)
    for (int32_t step = 1; step < size; ++step) {
      int32_t to = (rank + step) % size, from = (rank + size - step) % size;
      made.add(Kind::kSend, to, chunk, {}, {{Place::kInput, -1 - rank}}, {});
      made.add(Kind::kReceive, from, chunk, {{Place::kOutput, from}}, {}, {});
    }
  return made.program();
}

// Everyone sums its block, in the order of ranks, and sends the sum to everyone.
inline std::shared_ptr<const Program> all_reduce(int32_t size, int32_t rank, int32_t chunks) {
  Builder made(size, rank, chunks);
  for (int32_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int32_t> last;
    for (int32_t peer = 0; peer < size; ++peer)
      if (peer != rank) made.add(Kind::kSend, peer, chunk, {}, {{Place::kInput, peer}}, {});
    for (int32_t peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      Place from = last.empty() ? Place::kInput : Place::kOutput;
      last = {made.add(Kind::kReduce, peer, chunk, {{Place::kOutput, rank}}, {{from, rank}}, last)};
    }
    for (int32_t peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      made.add(Kind::kSend, peer, chunk, {}, {{Place::kOutput, rank}}, last);
      made.add(Kind::kReceive, peer, chunk, {{Place::kOutput, peer}}, {}, {});
    }
  }
  return made.program();
}

// Links of every pair, each way; `process`: the receiver reads large messages out of the sender's memory; `shared`: bytes go
// through memory that both have mapped; `boards`: what goes to several is laid out once.
inline void connect(std::vector<std::unique_ptr<Engine>>& engines, pid_t process, bool shared, bool boards) {
  int size = static_cast<int>(engines.size());
  std::vector<int> board(size, -1);
  for (int rank = 0; boards && rank < size; ++rank) {
    board[rank] = memory_of_link(1 << 20);
    engines[rank]->set_board(dup(board[rank]));
  }
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) {
      if (from == to) continue;
      auto [out, in] = pair_of_sockets();
      int memory = shared ? memory_of_link(16384) : -1;
      engines[to]->add_incoming(from, in, process, shared ? dup(memory) : -1, boards ? dup(board[from]) : -1);
      engines[from]->add_outgoing(to, out, process, memory, boards);
    }
  for (int each : board)
    if (each >= 0) close(each);
}

inline Signature signature(Collective collective, uint64_t elements) {
  return {collective, Type::kI32, collective == Collective::kAllReduce ? Reduction::kSum : Reduction::kNone, elements, 7};
}

inline size_t first_of(size_t elements, size_t size, size_t block) {
  return block * (elements / size) + std::min(block, elements % size);
}

}  // namespace pccl
