// Large messages within a node: the receiver reads the sender's memory.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine.hpp"
#include "reduce.hpp"

namespace pccl {
namespace {

constexpr size_t kScratch = 128 * 1024;

}  // namespace

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
