#include "link.hpp"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

#include "reduce.hpp"

namespace pccl {
namespace {

constexpr size_t kBuffer = 8192;           // holds a header and a short message
constexpr size_t kScratch = 128 * 1024;    // fits a core's own cache
constexpr size_t kAtOnce = 1024 * 1024;    // of one link before the others have a turn

// Sockets that a fork is to close; a mutex of its own, which no fork finds locked. Never destroyed: the engine's thread goes on
// while the process ends.
std::mutex& sockets_mutex = *new std::mutex;
std::set<int>& sockets = *new std::set<int>;

}  // namespace

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
    if (within_ == pieces_[at_].bytes) ++at_, within_ = 0;
  }
}

size_t Cursor::left() const {
  size_t sum = 0;
  for (size_t i = at_; i < pieces_.size(); ++i) sum += pieces_[i].bytes;
  return sum - within_;
}

void copy(Cursor to, Cursor from) {
  while (!to.done() && !from.done()) {
    size_t step = std::min(to.here(), from.here());
    if (to.data() != from.data()) std::memmove(to.data(), from.data(), step);
    to.skip(step);
    from.skip(step);
  }
}

void Link::settle() {
  size_t element = type_bytes(sink.type), used = 0;
  size_t whole = sink.held / element * element;
  while (used < whole) {
    size_t step = std::min({whole - used, sink.to.here(), sink.from.here()});
    combine(sink.type, sink.reduction, sink.to.data(), sink.from.data(), &sink.scratch[used], step / element);
    sink.to.skip(step);
    sink.from.skip(step);
    used += step;
  }
  std::memmove(sink.scratch.data(), sink.scratch.data() + used, sink.held - used);
  sink.held -= used;
}

void Link::pour(const char* from, size_t bytes) {
  sink.left -= bytes;
  switch (sink.kind) {
    case Sink::Kind::kDiscard: return;
    case Sink::Kind::kOwn: sink.own.insert(sink.own.end(), from, from + bytes); return;
    case Sink::Kind::kPlace:
      while (bytes > 0) {
        size_t step = std::min(bytes, sink.to.here());
        std::memcpy(sink.to.data(), from, step);
        sink.to.skip(step);
        from += step;
        bytes -= step;
      }
      return;
    case Sink::Kind::kReduce:
      sink.scratch.resize(kScratch);
      while (bytes > 0) {
        size_t step = std::min(bytes, kScratch - sink.held);
        std::memcpy(&sink.scratch[sink.held], from, step);
        sink.held += step;
        from += step;
        bytes -= step;
        if (sink.held == kScratch || sink.left == 0) settle();
      }
  }
}

ssize_t Link::get(iovec* parts, int count) {
  if (!shared) return readv(socket, parts, count);
  bool bell = false;
  ssize_t got = shared->in().read(parts, count, bell);
  if (bell) ring_bell();
  return got < 0 && errno == EAGAIN && ended ? 0 : got;
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

// Where it cannot be, the peer has been woken already, or has gone, which is an event of its own.
void Link::ring_bell() const { [[maybe_unused]] ssize_t sent = send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

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
    std::vector<iovec> parts;
    size_t planned = 0;
    Cursor ahead = sink.to;
    while (!ahead.done() && planned < std::min(sink.left, kAtOnce) && parts.size() < 64) {
      size_t step = std::min(ahead.here(), std::min(sink.left, kAtOnce) - planned);
      parts.push_back({ahead.data(), step});
      ahead.skip(step);
      planned += step;
    }
    ssize_t got = get(parts.data(), static_cast<int>(parts.size()));
    if (got > 0) {
      sink.to.skip(got);
      sink.left -= got;
    }
    return got;
  }
  if (direct && sink.kind == Sink::Kind::kReduce) {
    sink.scratch.resize(kScratch);
    iovec part{&sink.scratch[sink.held], std::min(kScratch - sink.held, sink.left)};
    ssize_t got = get(&part, 1);
    if (got > 0) {
      sink.held += got;
      sink.left -= got;
      if (sink.held == kScratch || sink.left == 0) settle();
    }
    return got;
  }
  if (direct && sink.kind == Sink::Kind::kOwn) {
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
