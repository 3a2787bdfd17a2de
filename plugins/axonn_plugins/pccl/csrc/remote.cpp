// Large messages within a node: the receiver reads the sender's memory.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine.hpp"
#include "reduce.hpp"

namespace pccl {

// Reads one of the messages that lie elsewhere, the one that the program has first; whether there was any. One at a time, for
// what comes from other nodes must not wait for what is at hand, and what goes to them first is to be summed first.
bool Engine::read_next() {
  if (ripe_.empty()) return false;
  auto next = ripe_.extract(ripe_.begin());
  auto [sequence, group, index] = next.key();
  Early& early = next.mapped();
  guarded([&] {
    Run& run = *runs_.at({group, sequence});
    const Op& op = run.program->ops[index];
    auto link = links_.find(early.link);
    if (link == links_.end())
      return fail_group(group, describe(run) + " waits for " + rank_name(group, early.peer) + ", but " + lost_.at(early.peer), true);
    Pieces to = run.buffers.pieces(op.to, op.chunk, run.program->chunks);
    if (accept(*link->second, run, early.header, to.bytes())) read_remote(run, index, early.body, early.link, early.header);
  }, early.link);
  return true;
}

void Engine::read_remote(Run& run, int32_t index, const std::vector<char>& rows, uint64_t id, const Header& header) {
  const Op& op = run.program->ops[index];
  Link& link = *links_.at(id);
  auto refuse = [&](const std::string& why) {
    std::string text = describe(run) + " needs " + rank_name(run.group, link.peer) + ", but " + why;
    lose(id, why);
    fail_group(run.group, text, true);  // its op waits no longer, so that losing the link does not end it
  };
  if (header.frame == Frame::kBoard) {
    if (!read_board(run, index, rows, link, header)) return refuse("what it says is not on its board");
    return acknowledge(link, run, index, header);
  }
  Pieces pieces;
  size_t bytes = 0;
  for (size_t at = 0; at < rows.size(); at += Header::kPieceBytes) {
    uint64_t row[2];
    std::memcpy(row, &rows[at], sizeof row);
    pieces.add(reinterpret_cast<char*>(row[0]), row[1]);
    bytes += std::min<uint64_t>(row[1], Header::kMostBytes);
  }
  if (bytes != header.bytes) return refuse("its frame's pieces do not add up");
  Cursor theirs(std::move(pieces)), to(run.buffers.pieces(op.to, op.chunk, run.program->chunks));
  Cursor from(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
  while (bytes > 0) {
    bool place = op.kind == Kind::kReceive;
    // Pieces hold whole elements, on both sides.
    size_t step = std::min({place ? bytes : Link::kScratch, theirs.here(), to.here(), place ? bytes : from.here()});
    iovec local{place ? to.data() : link.room(), step}, remote{theirs.data(), step};
    ssize_t got = process_vm_readv(link.process, &local, 1, &remote, 1, 0);
    if (got < 0 && (errno == ESRCH || errno == EFAULT)) {
      // It is dead, or has given the call up: what it said last, or else the end of its link, comes next and says why.
      posted_[{run.group, run.sequence, link.peer, op.tag}] = {&run, index};
      return;
    }
    if (got <= 0) return refuse("its memory could not be read");
    size_t whole = place ? got : got / run.buffers.element * run.buffers.element;
    if (whole == 0) return refuse("its memory could not be read");
    if (!place) {
      combine(run.signature.type, run.signature.reduction, to.data(), from.data(), link.room(), whole / run.buffers.element);
      from.skip(whole);
    }
    to.skip(whole);
    theirs.skip(whole);
    bytes -= whole;
  }
  // A sender that gives the call up says so first, and its memory may then hold anything.
  read(link);
  if (run.over) return;
  if (links_.contains(id)) acknowledge(link, run, index, header);
  else finish(run, index);
}

bool Engine::read_board(Run& run, int32_t index, const std::vector<char>& row, const Link& link, const Header& header) {
  uint64_t place[2];
  std::memcpy(place, row.data(), sizeof place);
  if (place[1] != header.bytes || !link.board->has(place[0], place[1])) return false;
  const Op& op = run.program->ops[index];
  Sink sink;
  sink.kind = op.kind == Kind::kReduce ? Sink::Kind::kReduce : Sink::Kind::kPlace;
  sink.left = header.bytes;
  sink.to = Cursor(run.buffers.pieces(op.to, op.chunk, run.program->chunks));
  sink.from = Cursor(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
  sink.type = run.signature.type;
  sink.reduction = run.signature.reduction;
  sink.pour(link.board->at(place[0]), header.bytes);
  return true;
}

// A message that lay elsewhere has been read.
void Engine::acknowledge(Link& link, Run& run, int32_t index, const Header& header) {
  Message acknowledgement;
  Header answer = header;
  answer.frame = Frame::kAck;
  answer.bytes = 0;
  answer.pieces = 0;
  answer.write(acknowledgement.header);
  dispatch(link, std::move(acknowledgement));
  finish(run, index);
}

}  // namespace pccl
