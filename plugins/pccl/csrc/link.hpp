// A link in one direction: frames go one way, acknowledgements the other.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "frame.hpp"
#include "program.hpp"
#include "ring.hpp"

namespace pccl {

// Walks through the bytes of pieces.
class Cursor {
 public:
  Cursor() = default;
  explicit Cursor(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {
    std::erase_if(pieces_, [](const Piece& piece) { return piece.bytes == 0; });
  }
  bool done() const { return at_ == pieces_.size(); }
  char* data() const { return pieces_[at_].at + within_; }
  size_t here() const { return done() ? 0 : pieces_[at_].bytes - within_; }
  void skip(size_t bytes);
  size_t left() const;
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::vector<Piece> pieces_;
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
  std::vector<char> scratch;
  size_t held = 0;  // bytes in scratch
};

struct Link {
  uint64_t id = 0;
  int peer = -1, socket = -1;
  pid_t process = 0;
  std::unique_ptr<SharedMemory> shared;  // what the bytes go through; the socket then only wakes, and ends
  bool ended = false;                    // that socket has
  std::string broken;                    // why it cannot be written to
  bool incoming = false, wants_write = false, paused = false, hung_up = false;
  bool drained = false;  // the last `fill` got less than it had room for
  size_t held = 0;  // bytes of messages from here that nobody has asked for yet

  std::deque<Message> queue;

  std::vector<unsigned char> buffer;
  size_t begin = 0, end = 0;
  bool in_body = false;
  Header header;
  Sink sink;

  // Bytes into the sink, from the buffer or wherever they were read.
  void pour(const char* from, size_t bytes);
  // Reads into the sink or the buffer: bytes, 0 at the end of the stream, -1 with errno.
  ssize_t fill();
  // As writev.
  ssize_t put(iovec* parts, int count);
  // Takes what woke this process, and whether the peer has gone.
  void hear();
  // Whether there is anything to do, where bytes go through memory.
  bool busy() const { return (!paused && shared->in().readable()) || (wants_write && shared->out().writable()); }
  // Has the peer wake this process when there is.
  void sleep() const;
  // Combines what is in the scratch.
  void settle();

 private:
  ssize_t get(iovec* parts, int count);
  void ring_bell() const;
};

// A forked child must not hold its parent's sockets: peers would not see the parent end.
void close_in_child(int socket);
void close_socket(int socket);

}  // namespace pccl
