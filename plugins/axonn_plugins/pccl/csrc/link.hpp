// A link in one direction: frames go one way, acknowledgements the other.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "address.hpp"
#include "frame.hpp"
#include "program.hpp"
#include "ring.hpp"

namespace pccl {

using Clock = std::chrono::steady_clock;

// Walks through the bytes of pieces.
class Cursor {
 public:
  Cursor() = default;
  explicit Cursor(Pieces pieces) : pieces_(std::move(pieces)) {}
  bool done() const { return at_ == pieces_.size(); }
  char* data() const { return piece().at + within_; }
  size_t here() const { return done() ? 0 : piece().bytes - within_; }
  void skip(size_t bytes);
  // Up to `room` parts of what is ahead, of at most so many bytes together; how many.
  int parts(iovec* to, int room, size_t most) const;

 private:
  const Piece& piece() const { return pieces_.begin()[at_]; }

  Pieces pieces_;
  size_t at_ = 0, within_ = 0;
};

void copy(Cursor to, Cursor from);

// A frame to be written.
struct Message {
  unsigned char header[Header::kBytes];
  size_t header_sent = 0;
  std::vector<char> owned;  // the body where it is the message's own
  Cursor body;
  uint64_t group = 0, sequence = 0;
  void* run = nullptr;  // whose memory the body is in
  int32_t op = -1;
};

// Where the body that is arriving goes.
struct Sink {
  enum class Kind { kDiscard, kOwn, kPlace, kReduce } kind = Kind::kDiscard;
  size_t left = 0;
  std::vector<char> own;
  Cursor to, from;
  void* run = nullptr;
  int32_t op = -1;
  Type type = Type::kU8;
  Reduction reduction = Reduction::kNone;
  char part[8];     // of an element, the rest of which is still to come
  size_t held = 0;  // bytes of it

  // Takes so many bytes of the body.
  void pour(const char* at, size_t bytes);

 private:
  void reduce(const char* at, size_t bytes);
};

struct Link {
  static constexpr size_t kScratch = 128 * 1024;  // fits a core's own cache

  uint64_t id = 0;
  int peer = -1, socket = -1;
  pid_t process = 0;
  std::unique_ptr<SharedMemory> shared;  // what the bytes go through; the socket then only wakes, and ends
  bool ended = false;                    // that socket has
  std::shared_ptr<Board> board;          // the peer's, of what comes in
  bool boarded = false;                  // the peer has ours
  std::string broken;                    // why it cannot be written to
  bool incoming = false, wants_write = false, paused = false, hung_up = false;
  bool drained = false;  // the last `fill` got less than it had room for
  bool far = false;      // the peer is on another node
  int knock = -1;        // a socket that asks whether that node still answers
  Clock::time_point answered{};  // by that
  size_t held = 0;  // bytes of messages from here that nobody has asked for yet

  std::deque<Message> queue;

  std::vector<unsigned char> buffer;
  size_t begin = 0, end = 0;
  bool in_body = false;
  Header header;
  Sink sink;
  // Has epoll tell of bytes of a body only when so many have come that it is worth it.
  void expect();
  // Reads into the sink or the buffer: bytes, 0 at the end of the stream, -1 with errno.
  ssize_t fill();
  // Where kScratch bytes that are to be added up lie meanwhile.
  char* room();
  // Writes what can be written of a message; whether that is all. Where it can never be, `broken` says why.
  bool write(Message& message);
  // Takes what woke this process, and whether the peer has gone.
  void hear();
  // Whether there is anything to do, where bytes go through memory.
  bool busy() const { return (!paused && shared->in().readable()) || (wants_write && shared->out().writable()); }
  // Wakes the peer, if it sleeps.
  void call() const;
  // Has the peer wake this process when there is.
  void sleep() const;

 private:
  ssize_t get(iovec* parts, int count);
  ssize_t pass();
  ssize_t put(iovec* parts, int count);
  void ring_bell() const;

  std::unique_ptr<char[]> scratch_;
  int expected_ = 1;
};

inline constexpr double kSilence = 30;  // seconds, where nothing else was asked for

// As getpid, of which each call asks the kernel.
pid_t this_process();
// A forked child must not hold its parent's sockets: peers would not see the parent end.
void close_in_child(int socket);
void close_socket(int socket);

}  // namespace pccl
