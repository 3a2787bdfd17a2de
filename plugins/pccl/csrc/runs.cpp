// How a program is carried out: ops begin as soon as those that they wait for are done.
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "engine.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

// From here on reading the sender's memory beats two copies through a socket.
constexpr size_t kRemoteBytes = 16 * 1024;
constexpr size_t kScratch = 128 * 1024;

size_t total(const std::vector<Piece>& pieces) {
  size_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.bytes;
  return sum;
}

void copy(Cursor to, Cursor from) {
  while (!to.done() && !from.done()) {
    size_t step = std::min(to.here(), from.here());
    if (to.data() != from.data()) std::memmove(to.data(), from.data(), step);
    to.skip(step);
    from.skip(step);
  }
}

}  // namespace

void Engine::advance(Run& run) {
  if (run.advancing) return;
  run.advancing = true;
  while (!run.ready.empty() && !run.over) {
    int32_t op = run.ready.front();
    run.ready.pop_front();
    begin(run, op);
  }
  run.advancing = false;
  if (run.left == 0 && !run.over) complete(run);
}

void Engine::begin(Run& run, int32_t index) {
  const Op& op = run.program->ops[index];
  switch (op.kind) {
    case Kind::kSend: return send(run, index);
    case Kind::kReceive: case Kind::kReduce: return receive(run, index);
    case Kind::kCopy:
      copy(Cursor(run.buffers.pieces(op.to, op.chunk, run.program->chunks)),
           Cursor(run.buffers.pieces(op.from, op.chunk, run.program->chunks)));
      return finish(run, index);
  }
}

void Engine::finish(Run& run, int32_t index) {
  if (run.over || run.finished[index]) return;
  run.finished[index] = true;
  --run.left;
  for (int32_t next : run.program->ops[index].before)
    if (--run.waits[next] == 0) run.ready.push_back(next);
  advance(run);
}

void Engine::complete(Run& run) {
  if (run.signature.reduction == Reduction::kAverage) {
    const Buffers& buffers = run.buffers;
    size_t rank = run.program->rank, own = buffers.starts[rank + 1] - buffers.starts[rank];
    divide(run.signature.type, buffers.output, buffers.whole_output ? buffers.starts.back() : own, run.program->size);
  }
  forget(run);
  run.done("");
}

void Engine::send(Run& run, int32_t index) {
  const Op& op = run.program->ops[index];
  const Group& group = groups_.at(run.group);
  int peer = group.peers[op.peer];
  auto out = outgoing_.find(peer);
  if (out == outgoing_.end() || lost_.contains(peer))
    return fail_group(run.group, describe(run) + " has no link to " + rank_name(run.group, peer) +
                                     (lost_.contains(peer) ? ": " + lost_.at(peer) : ""), true);
  Link& link = *links_.at(out->second);
  std::vector<Piece> pieces = run.buffers.pieces(op.from, op.chunk, run.program->chunks);
  Header header;
  header.frame = Frame::kData;
  header.signature = run.signature;
  header.group = run.group;
  header.sequence = run.sequence;
  header.bytes = total(pieces);
  header.tag = op.tag;
  Message message;
  message.group = run.group;
  message.sequence = run.sequence;
  message.run = &run;
  message.op = index;
  if (link.process > 0 && header.bytes >= kRemoteBytes && pieces.size() <= Header::kMostPieces) {
    header.frame = Frame::kRemote;
    header.pieces = static_cast<uint32_t>(pieces.size());
    for (const Piece& piece : pieces) {
      uint64_t row[2] = {reinterpret_cast<uintptr_t>(piece.at), piece.bytes};
      message.owned.insert(message.owned.end(), reinterpret_cast<char*>(row), reinterpret_cast<char*>(row + 2));
    }
    unread_[{run.group, run.sequence, peer, op.tag}] = {&run, index};
    message.op = -1;  // done when it is acknowledged
  }
  header.write(message.header);
  link.queue.push_back(std::move(message));
  Message& last = link.queue.back();
  last.body = last.owned.empty() ? Cursor(std::move(pieces)) : Cursor({{last.owned.data(), last.owned.size()}});
  flush(link);
}

void Engine::receive(Run& run, int32_t index) {
  const Op& op = run.program->ops[index];
  int peer = groups_.at(run.group).peers[op.peer];
  Key key{run.group, run.sequence, peer, op.tag};
  auto early = early_.find(key);
  if (early != early_.end()) {
    Early message = std::move(early->second);
    early_.erase(early);
    return take_early(run, index, message);
  }
  if (lost_.contains(peer))
    return fail_group(run.group, describe(run) + " waits for " + rank_name(run.group, peer) + ", but " + lost_.at(peer), true);
  posted_[key] = {&run, index};
}

// Whether a message is as long as its op expects; the group fails where not.
bool Engine::accept(Link& link, Run& run, int32_t index, const Header& header) {
  const Op& op = run.program->ops[index];
  size_t expected = total(run.buffers.pieces(op.to, op.chunk, run.program->chunks));
  if (header.bytes == expected) return true;
  fail_group(run.group, describe(run) + " expects a message of " + std::to_string(expected) + " bytes from " +
                            rank_name(run.group, link.peer) + " and gets " + std::to_string(header.bytes), true);
  return false;
}

void Engine::take_early(Run& run, int32_t index, Early& early) {
  const Op& op = run.program->ops[index];
  auto link = links_.find(early.link);
  int peer = groups_.at(run.group).peers[op.peer];
  if (early.header.frame == Frame::kRemote) {
    if (link == links_.end())
      return fail_group(run.group, describe(run) + " waits for " + rank_name(run.group, peer) + ", but " + lost_.at(peer), true);
    if (accept(*link->second, run, index, early.header)) read_remote(run, index, early.body, early.link, early.header);
    return;
  }
  std::vector<Piece> to = run.buffers.pieces(op.to, op.chunk, run.program->chunks);
  if (early.header.bytes != total(to))
    return fail_group(run.group, describe(run) + " expects a message of " + std::to_string(total(to)) + " bytes from " +
                                     rank_name(run.group, peer) + " and gets " + std::to_string(early.header.bytes), true);
  if (op.kind == Kind::kReceive) {
    copy(Cursor(std::move(to)), Cursor({{early.body.data(), early.body.size()}}));
  } else {
    Link reducer;
    reducer.sink.kind = Sink::Kind::kReduce;
    reducer.sink.left = early.body.size();
    reducer.sink.to = Cursor(std::move(to));
    reducer.sink.from = Cursor(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
    reducer.sink.type = run.signature.type;
    reducer.sink.reduction = run.signature.reduction;
    reducer.pour(early.body.data(), early.body.size());
  }
  finish(run, index);
}

void Engine::read_remote(Run& run, int32_t index, const std::vector<char>& rows, uint64_t id, const Header& header) {
  const Op& op = run.program->ops[index];
  Link& link = *links_.at(id);
  std::vector<Piece> pieces;
  size_t bytes = 0;
  for (size_t at = 0; at < rows.size(); at += Header::kPieceBytes) {
    uint64_t row[2];
    std::memcpy(row, &rows[at], sizeof row);
    pieces.push_back({reinterpret_cast<char*>(row[0]), row[1]});
    bytes += std::min<uint64_t>(row[1], Header::kMostBytes);
  }
  if (bytes != header.bytes) return lose(id, "its frame's pieces do not add up");
  Cursor theirs(std::move(pieces)), to(run.buffers.pieces(op.to, op.chunk, run.program->chunks));
  Cursor from(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
  std::vector<char> scratch(op.kind == Kind::kReduce ? std::min(kScratch, bytes) : 0);
  while (bytes > 0) {
    bool place = op.kind == Kind::kReceive;
    // Pieces hold whole elements, on both sides.
    size_t step = std::min({place ? bytes : kScratch, theirs.here(), to.here(), place ? bytes : from.here()});
    iovec local{place ? to.data() : scratch.data(), step}, remote{theirs.data(), step};
    ssize_t got = process_vm_readv(link.process, &local, 1, &remote, 1, 0);
    if (got <= 0) return lose(id, "its memory could not be read");
    size_t whole = place ? got : got / run.buffers.element * run.buffers.element;
    if (whole == 0) return lose(id, "its memory could not be read");
    if (!place) {
      combine(run.signature.type, run.signature.reduction, to.data(), from.data(), scratch.data(), whole / run.buffers.element);
      from.skip(whole);
    }
    to.skip(whole);
    theirs.skip(whole);
    bytes -= whole;
  }
  Message acknowledgement;
  Header answer = header;
  answer.frame = Frame::kAck;
  answer.bytes = 0;
  answer.pieces = 0;
  answer.write(acknowledgement.header);
  link.queue.push_back(std::move(acknowledgement));
  flush(link);
  finish(run, index);
}

}  // namespace pccl
