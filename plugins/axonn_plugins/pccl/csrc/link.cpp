#include "link.hpp"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

#include "reduce.hpp"

namespace pccl {
namespace {

constexpr size_t kBuffer = 8192;           // holds a header and a short message
constexpr size_t kAtOnce = 1024 * 1024;    // of one link before the others have a turn
constexpr size_t kExpected = 128 * 1024;   // to be woken costs as much as to copy some ten thousand
constexpr int kParts = 64;                 // of memory that the kernel is given together

// Sockets that a fork is to close; a mutex of its own, which no fork finds locked. Never destroyed: the engine's thread goes on
// while the process ends.
std::mutex& sockets_mutex = *new std::mutex;
std::set<int>& sockets = *new std::set<int>;

}  // namespace

pid_t this_process() {
  static std::atomic<pid_t> known = getpid();
  static const int registered = pthread_atfork(nullptr, nullptr, [] { known = getpid(); });
  (void)registered;
  return known.load(std::memory_order_relaxed);
}

void close_in_child(int socket) {
  static const int registered = pthread_atfork([] { sockets_mutex.lock(); }, [] { sockets_mutex.unlock(); }, [] {
    for (int inherited : sockets) close(inherited);
    sockets.clear();
    sockets_mutex.unlock();
  });
  (void)registered;
  std::lock_guard lock(sockets_mutex);
  sockets.insert(socket);
}

void close_socket(int socket) {
  std::lock_guard lock(sockets_mutex);
  sockets.erase(socket);
  close(socket);
}

void Cursor::skip(size_t bytes) {
  while (bytes > 0) {
    size_t step = std::min(bytes, here());
    within_ += step;
    bytes -= step;
    if (within_ == piece().bytes) ++at_, within_ = 0;
  }
}

int Cursor::parts(iovec* to, int room, size_t most) const {
  int count = 0;
  size_t within = within_;
  for (size_t at = at_; at < pieces_.size() && count < room && most > 0; ++at) {
    const Piece& next = pieces_.begin()[at];
    size_t step = std::min(next.bytes - within, most);
    to[count++] = {next.at + within, step};
    most -= step;
    within = 0;
  }
  return count;
}

void copy(Cursor to, Cursor from) {
  while (!to.done() && !from.done()) {
    size_t step = std::min(to.here(), from.here());
    bool apart = to.data() + step <= from.data() || from.data() + step <= to.data();
    if (apart) stream(to.data(), from.data(), step);
    else if (to.data() != from.data()) std::memmove(to.data(), from.data(), step);
    to.skip(step);
    from.skip(step);
  }
}

// Whole elements.
void Sink::reduce(const char* at, size_t bytes) {
  while (bytes > 0) {
    size_t step = std::min({bytes, to.here(), from.here()});
    combine(type, reduction, to.data(), from.data(), at, step / type_bytes(type));
    to.skip(step);
    from.skip(step);
    at += step;
    bytes -= step;
  }
}

void Sink::pour(const char* at, size_t bytes) {
  left -= bytes;
  switch (kind) {
    case Kind::kDiscard: return;
    case Kind::kOwn:
      if (own.empty()) own.reserve(std::min(left + bytes, kAtOnce));
      own.insert(own.end(), at, at + bytes);
      return;
    case Kind::kPlace:
      while (bytes > 0) {
        size_t step = std::min(bytes, to.here());
        stream(to.data(), at, step);
        to.skip(step);
        at += step;
        bytes -= step;
      }
      return;
    case Kind::kReduce:
      size_t element = type_bytes(type);
      if (held > 0) {
        size_t step = std::min(bytes, element - held);
        std::memcpy(part + held, at, step);
        held += step;
        at += step;
        bytes -= step;
        if (held < element) return;
        reduce(part, element);
      }
      size_t whole = bytes / element * element;
      reduce(at, whole);
      held = bytes - whole;
      if (held > 0) std::memcpy(part, at + whole, held);
  }
}

void Link::expect() {
  bool waits = !shared && in_body && begin == end && sink.left >= kBuffer;
  int bytes = waits ? static_cast<int>(std::min(sink.left, kExpected)) : 1;
  if (bytes != expected_ && setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0) expected_ = bytes;
}

char* Link::room() {
  if (!scratch_) scratch_ = std::make_unique_for_overwrite<char[]>(kScratch);
  return scratch_.get();
}

ssize_t Link::get(iovec* parts, int count) {
  if (!shared) return readv(socket, parts, count);
  bool bell = false;
  ssize_t got = shared->in().read(parts, count, bell);
  if (bell) ring_bell();
  return got < 0 && errno == EAGAIN && ended ? 0 : got;
}

// From the shared memory into the sink.
ssize_t Link::pass() {
  const char* at = nullptr;
  ssize_t here = shared->in().ahead(at);
  if (here < 0) return errno == EAGAIN && ended ? 0 : here;
  size_t step = std::min<size_t>(here, sink.left);
  sink.pour(at, step);
  if (shared->in().skip(step)) ring_bell();
  return static_cast<ssize_t>(step);
}

ssize_t Link::put(iovec* parts, int count) {
  if (shared) {
    bool bell = false;
    ssize_t sent = shared->out().write(parts, count, bell);
    if (bell) ring_bell();
    return sent;
  }
  msghdr block{};
  block.msg_iov = parts;
  block.msg_iovlen = count;
  return sendmsg(socket, &block, MSG_NOSIGNAL);
}

bool Link::write(Message& message) {
  while (message.header_sent < Header::kBytes || !message.body.done()) {
    iovec parts[kParts];
    int count = 0;
    if (message.header_sent < Header::kBytes)
      parts[count++] = {message.header + message.header_sent, Header::kBytes - message.header_sent};
    count += message.body.parts(parts + count, kParts - count, SIZE_MAX);
    ssize_t sent = put(parts, count);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (sent < 0) {
      broken = broken_link(errno);
      return false;
    }
    size_t of_header = std::min<size_t>(sent, Header::kBytes - message.header_sent);
    message.header_sent += of_header;
    message.body.skip(sent - of_header);
  }
  return true;
}

// Where it cannot be, the peer has been woken already, or has gone, which is an event of its own.
void Link::ring_bell() const { [[maybe_unused]] ssize_t sent = send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

void Link::call() const {
  if (shared && shared->out().sleeps()) ring_bell();
}

void Link::hear() {
  char bells[64];
  ssize_t got = recv(socket, bells, sizeof bells, MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) ended = true;
}

void Link::sleep() const {
  shared->in().sleep(true);
  if (wants_write) shared->out().wait_for_room();
}

ssize_t Link::fill() {
  drained = false;
  bool direct = in_body && begin == end && sink.left >= kBuffer;
  if (direct && sink.kind == Sink::Kind::kPlace) {
    iovec parts[kParts];
    ssize_t got = get(parts, sink.to.parts(parts, kParts, std::min(sink.left, kAtOnce)));
    if (got > 0) {
      sink.to.skip(got);
      sink.left -= got;
    }
    return got;
  }
  if (direct && sink.kind == Sink::Kind::kReduce) {
    if (shared) return pass();
    iovec part{room(), std::min(kScratch, sink.left)};
    ssize_t got = get(&part, 1);
    if (got > 0) sink.pour(room(), got);
    return got;
  }
  if (direct && sink.kind == Sink::Kind::kOwn) {
    if (shared) return pass();
    size_t before = sink.own.size(), step = std::min(sink.left, kAtOnce);
    sink.own.resize(before + step);
    iovec part{&sink.own[before], step};
    ssize_t got = get(&part, 1);
    sink.own.resize(before + std::max<ssize_t>(got, 0));
    if (got > 0) sink.left -= got;
    return got;
  }
  buffer.resize(kBuffer);
  if (begin == end) begin = end = 0;
  if (end == kBuffer) {
    std::memmove(buffer.data(), buffer.data() + begin, end - begin);
    end -= begin;
    begin = 0;
  }
  iovec part{&buffer[end], kBuffer - end};
  ssize_t got = get(&part, 1);
  drained = !shared && got > 0 && static_cast<size_t>(got) < kBuffer - end;
  if (got > 0) end += got;
  return got;
}

}  // namespace pccl
