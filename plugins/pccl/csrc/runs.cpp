// How a program is carried out: ops begin as soon as those that they wait for are done.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

// From here on reading the sender's memory beats two copies through a socket.
constexpr size_t kRemoteBytes = 64 * 1024;
constexpr size_t kScratch = 128 * 1024;

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
    release(message);
    return take_early(run, index, message);
  }
  if (lost_.contains(peer))
    return fail_group(run.group, describe(run) + " waits for " + rank_name(run.group, peer) + ", but " + lost_.at(peer), true);
  posted_[key] = {&run, index};
  resume(peer);
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

void Engine::read_remote(Run& run, int32_t index, const std::vector<char>& rows, uint64_t id, const Header& header) {
  const Op& op = run.program->ops[index];
  Link& link = *links_.at(id);
  auto refuse = [&](const std::string& why) {
    std::string text = describe(run) + " needs " + rank_name(run.group, link.peer) + ", but " + why;
    lose(id, why);
    fail_group(run.group, text, true);  // its op waits no longer, so that losing the link does not end it
  };
  std::vector<Piece> pieces;
  size_t bytes = 0;
  for (size_t at = 0; at < rows.size(); at += Header::kPieceBytes) {
    uint64_t row[2];
    std::memcpy(row, &rows[at], sizeof row);
    pieces.push_back({reinterpret_cast<char*>(row[0]), row[1]});
    bytes += std::min<uint64_t>(row[1], Header::kMostBytes);
  }
  if (bytes != header.bytes) return refuse("its frame's pieces do not add up");
  Cursor theirs(std::move(pieces)), to(run.buffers.pieces(op.to, op.chunk, run.program->chunks));
  Cursor from(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
  std::vector<char> scratch(op.kind == Kind::kReduce ? std::min(kScratch, bytes) : 0);
  while (bytes > 0) {
    bool place = op.kind == Kind::kReceive;
    // Pieces hold whole elements, on both sides.
    size_t step = std::min({place ? bytes : kScratch, theirs.here(), to.here(), place ? bytes : from.here()});
    iovec local{place ? to.data() : scratch.data(), step}, remote{theirs.data(), step};
    ssize_t got = process_vm_readv(link.process, &local, 1, &remote, 1, 0);
    if (got < 0 && errno == ESRCH) {
      // It is dead: what it said last, or else the end of its link, comes next and says why.
      posted_[{run.group, run.sequence, link.peer, op.tag}] = {&run, index};
      return;
    }
    if (got <= 0) return refuse("its memory could not be read");
    size_t whole = place ? got : got / run.buffers.element * run.buffers.element;
    if (whole == 0) return refuse("its memory could not be read");
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
