// Links' events: frames read, messages written, links lost.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine.hpp"

namespace pccl {
namespace {

constexpr size_t kMostAtOnce = 4 * 1024 * 1024;  // read of one link before the others have a turn

}  // namespace

void Engine::on_event(uint64_t id, uint32_t events) {
  auto found = links_.find(id);
  if (found == links_.end()) return;
  if (events & (EPOLLHUP | EPOLLERR)) {
    // What is left to read is no more than the kernel holds.
    found->second->hung_up = true;
    pause(*found->second, false);
  }
  // Acknowledgements first: writing may find that the peer has gone, when all that it was sent is done.
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    if (found->second->shared) found->second->hear();
    read(*found->second);
  }
  found = links_.find(id);
  if (found != links_.end() && events & EPOLLOUT) flush(*found->second);
}

void Engine::read(Link& link) {
  uint64_t id = link.id;
  for (size_t taken = 0; taken < kMostAtOnce;) {
    if (crowded(link)) {
      pause(link, true);
      break;
    }
    ssize_t got = link.fill();
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      bool cut = link.in_body || link.begin != link.end;
      return lose(id, got < 0 ? broken_link(errno) : cut ? "its link ended in the middle of a frame" : "it has gone");
    }
    taken += got;
    // One read may bring many frames, and the end of one.
    while (true) {
      if (!link.in_body) {
        if (link.end - link.begin < Header::kBytes) break;
        std::string wrong = link.header.read(&link.buffer[link.begin]);
        link.begin += Header::kBytes;
        if (!wrong.empty()) return lose(id, wrong);
        if (!on_header(link) || !links_.contains(id)) return;
      }
      size_t step = std::min(link.end - link.begin, link.sink.left);
      if (step) link.sink.pour(reinterpret_cast<char*>(&link.buffer[link.begin]), step);
      link.begin += step;
      if (link.sink.left > 0) break;
      link.in_body = false;
      on_body(link);
      if (!links_.contains(id)) return;
    }
    if (link.drained && !link.hung_up) break;  // what comes later is an event of its own
  }
  link.expect();
}

// Decides where the body goes; false where the link was given up.
bool Engine::on_header(Link& link) {
  const Header& header = link.header;
  link.sink = Sink();
  link.sink.left = header.body();
  link.in_body = true;
  bool data = header.frame == Frame::kData || header.elsewhere();
  if (!link.incoming && header.frame == Frame::kAck) return true;
  if (!link.incoming && data) {
    lose(link.id, "it sent data against the direction of its link");
    return false;
  }
  if (header.frame == Frame::kAck) {
    lose(link.id, "it acknowledged what was not sent");
    return false;
  }
  if (header.frame == Frame::kBoard ? !link.board : header.frame == Frame::kRemote && link.process <= 0) {
    lose(link.id, "its memory is not to be read here");
    return false;
  }
  auto group = groups_.find(header.group);
  if (group != groups_.end() && !is_member(header.group, link.peer)) {
    lose(link.id, kStranger);
    return false;
  }
  if (removed_.contains(header.group) || (group != groups_.end() && !group->second.broken.empty())) {
    answer(link, header);
    return links_.contains(link.id);
  }
  link.sink.kind = Sink::Kind::kOwn;
  if (header.frame != Frame::kData) return true;
  if (header.sequence >= kPoints) {
    if (Run* wants = match(header, link.peer)) place(link, *wants, 0);
    return true;
  }
  auto run = runs_.find({header.group, header.sequence});
  if (run == runs_.end()) {
    auto newest = newest_.find(header.group);
    bool late = newest != newest_.end() && header.sequence <= newest->second;
    if (late) link.sink.kind = Sink::Kind::kDiscard;
    return true;
  }
  if (!(header.signature == run->second->signature)) {
    link.sink.kind = Sink::Kind::kDiscard;
    fail_group(header.group, mismatch(*run->second, link.peer, header), true);
    return true;
  }
  auto found = posted_.find({header.group, header.sequence, link.peer, header.tag});
  if (found == posted_.end()) return true;
  Posted posted = found->second;
  posted_.erase(found);
  place(link, *posted.run, posted.op);
  return true;
}

// What is arriving goes where its op wants it.
void Engine::place(Link& link, Run& run, int32_t index) {
  const Op& op = run.program->ops[index];
  Pieces to = run.buffers.pieces(op.to, op.chunk, run.program->chunks);
  if (!accept(link, run, link.header, to.bytes())) {
    link.sink.kind = Sink::Kind::kDiscard;
    return;
  }
  link.sink.kind = op.kind == Kind::kReduce ? Sink::Kind::kReduce : Sink::Kind::kPlace;
  link.sink.to = Cursor(std::move(to));
  link.sink.from = Cursor(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
  link.sink.run = &run;
  link.sink.op = index;
  link.sink.type = run.signature.type;
  link.sink.reduction = run.signature.reduction;
}

void Engine::on_body(Link& link) {
  Header header = link.header;
  Sink::Kind kind = std::exchange(link.sink.kind, Sink::Kind::kDiscard);
  Run* whose = static_cast<Run*>(std::exchange(link.sink.run, nullptr));
  std::vector<char> own = std::exchange(link.sink.own, {});
  if (header.frame == Frame::kAck) return on_acknowledged(link, header);
  if (header.frame == Frame::kOver && !link.incoming) return settle(link.peer, header.group);
  // After what may have to be read, for links keep the order of what they carry.
  if (header.frame == Frame::kError && link.incoming) tell(link, Frame::kOver, header.group, 0, nullptr, 0);
  if (header.frame == Frame::kLeft) settle(link.peer, header.group);
  if (kind == Sink::Kind::kDiscard || header.frame == Frame::kOver) return;
  if (header.frame == Frame::kAsk) return on_ask(link, header);
  if (header.frame == Frame::kState) return on_state(link, header, own);
  if (header.frame == Frame::kError || header.frame == Frame::kLeft) {
    std::string why(own.begin(), own.end());
    // It is shown to a person, by way of Python's strings.
    std::replace_if(why.begin(), why.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    if (header.frame == Frame::kLeft) {
      // What the peer sent before comes by this link, what it acknowledged by the other.
      bool sends = link.incoming || !incoming_.contains(link.peer), receives = !link.incoming || !outgoing_.contains(link.peer);
      return on_left(header.group, link.peer, {header.sequence, why, sends, receives});
    }
    if (groups_.contains(header.group))
      fail_group(header.group, why, true);
    else if (broken_early_.size() < kMostBroken)
      broken_early_[header.group] = why;
    return;
  }
  if (kind != Sink::Kind::kOwn) return header.sequence >= kPoints ? acknowledge(link, *whose, 0, header) : finish(*whose, link.sink.op);
  Key key{header.group, header.sequence, link.peer, header.tag};
  Early early{header, std::move(own), link.id, link.peer};
  if (header.sequence >= kPoints) {  // the sender's number, which a call of this rank's may have, too
    if (!groups_.contains(header.group)) return keep_early(link, key, std::move(early));
    if (Run* wants = match(header, link.peer)) return take_point(*wants, early);
    // Its group may have failed as it does not match.
    if (groups_.at(header.group).broken.empty()) keep_early(link, key, std::move(early));
    return;
  }
  auto run = runs_.find({header.group, header.sequence});
  if (run != runs_.end() && !(header.signature == run->second->signature))
    return fail_group(header.group, mismatch(*run->second, link.peer, header), true);
  // Its op may have come to wait for it while it arrived.
  auto found = posted_.find(key);
  if (found != posted_.end()) {
    Posted posted = found->second;
    posted_.erase(found);
    return take_early(*posted.run, posted.op, early);
  }
  auto newest = newest_.find(header.group);
  bool late = run == runs_.end() && newest != newest_.end() && header.sequence <= newest->second;
  if (!late) keep_early(link, key, std::move(early));
}

void Engine::on_acknowledged(Link& link, const Header& header) {
  auto found = unread_.find({header.group, header.sequence, link.peer, header.tag});
  if (found == unread_.end()) return;  // of an operation that was given up
  Posted posted = found->second;
  unread_.erase(found);
  finish(*posted.run, posted.op);
}

// Writes a message at once, or else when its turn has come.
void Engine::dispatch(Link& link, Message message) {
  if (link.queue.empty() && link.broken.empty() && write(link, message)) {
    if (message.op >= 0) finish(*static_cast<Run*>(message.run), message.op);
    return;
  }
  link.queue.push_back(std::move(message));
  flush(link);
}

// As the link's; it is not lost before what the peer said last is read, nor while others hold it.
bool Engine::write(Link& link, Message& message) {
  bool all = link.write(message);
  if (!link.broken.empty()) dying_.push_back(link.id);
  return all;
}

void Engine::flush(Link& link) {
  uint64_t id = link.id;
  while (!link.queue.empty() && link.broken.empty()) {
    Message& message = link.queue.front();
    if (!write(link, message)) break;
    auto run = message.op < 0 ? runs_.end() : runs_.find({message.group, message.sequence});
    int32_t op = message.op;
    link.queue.pop_front();
    if (run != runs_.end()) {
      finish(*run->second, op);
      if (!links_.contains(id)) return;
    }
  }
  bool wanted = !link.queue.empty() && link.broken.empty();
  if (wanted == link.wants_write) return;
  link.wants_write = wanted;
  watch(link, EPOLL_CTL_MOD);
}

}  // namespace pccl
