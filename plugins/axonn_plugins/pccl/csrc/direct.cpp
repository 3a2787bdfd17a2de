#include "direct.hpp"

#include <utility>

namespace pccl {
namespace {

using Spans = std::vector<Span>;
using Ops = std::vector<int32_t>;  // their numbers

// Each message of a pair has the next number as its tag.
class Writer {
 public:
  Writer(int32_t size, int32_t rank) : sent_(size), received_(size) {
    made_.size = size;
    made_.rank = rank;
  }
  int32_t send(int32_t peer, Spans from, const Ops& after = {}) { return add(Kind::kSend, peer, {}, std::move(from), after); }
  int32_t receive(int32_t peer, Spans to) { return add(Kind::kReceive, peer, std::move(to), {}, {}); }
  int32_t reduce(int32_t peer, Span to, Span from, const Ops& after) { return add(Kind::kReduce, peer, {to}, {from}, after); }
  int32_t copy(Span to, Span from) { return add(Kind::kCopy, -1, {to}, {from}, {}); }
  ProgramPointer program() {
    made_.liken();
    return std::make_shared<Program>(std::move(made_));
  }

  // Is over when the messages so far have come at all ranks: log2 of them rounds, in which each tells what it has heard so far.
  void agree(Ops come) {
    for (int32_t distance = 1; distance < made_.size; distance *= 2) {
      send((made_.rank + distance) % made_.size, {}, come);
      come.push_back(receive((made_.rank + made_.size - distance) % made_.size, {}));
    }
  }
  // The other ranks, each rank beginning with the next one: so not all send to the same one first.
  Ops others() const {
    Ops ranks;
    for (int32_t step = 1; step < made_.size; ++step) ranks.push_back((made_.rank + step) % made_.size);
    return ranks;
  }

 private:
  int32_t add(Kind kind, int32_t peer, Spans to, Spans from, const Ops& after) {
    uint32_t tag = kind == Kind::kCopy ? 0 : (kind == Kind::kSend ? sent_ : received_)[peer]++;
    return made_.add({kind, peer, -1, tag, std::move(to), std::move(from), {}}, after);
  }

  Program made_;
  std::vector<uint32_t> sent_, received_;
};

Span input(int32_t slot) { return {Place::kInput, slot, slot, 1}; }
Span output(int32_t slot) { return {Place::kOutput, slot, slot, 1}; }
// The only slot there is, as block `block`.
Span only(Place place, int32_t block) { return {place, 0, block, 1}; }

// To one rank, which then tells all others that it has everything.
ProgramPointer to_root(int32_t size, int32_t rank, int32_t root, bool data) {
  Writer made(size, rank);
  if (rank != root) {
    made.send(root, data ? Spans{only(Place::kInput, rank)} : Spans{});
    made.receive(root, {});
    return made.program();
  }
  if (data) made.copy(output(rank), only(Place::kInput, rank));
  Ops come;
  for (int32_t peer : made.others()) come.push_back(made.receive(peer, data ? Spans{output(peer)} : Spans{}));
  for (int32_t peer : made.others()) made.send(peer, {}, come);
  return made.program();
}

}  // namespace

ProgramPointer all_to_all(int32_t size, int32_t rank) {
  Writer made(size, rank);
  made.copy(output(rank), input(rank));
  Ops come;
  for (int32_t peer : made.others()) {
    made.send(peer, {input(peer)});
    int32_t from = (2 * rank + size - peer) % size;
    come.push_back(made.receive(from, {output(from)}));
  }
  made.agree(come);
  return made.program();
}

ProgramPointer gather(int32_t size, int32_t rank, int32_t root) { return to_root(size, rank, root, true); }

ProgramPointer roll_call(int32_t size, int32_t rank) { return to_root(size, rank, 0, false); }

ProgramPointer scatter(int32_t size, int32_t rank, int32_t root) {
  Writer made(size, rank);
  if (rank != root) {
    int32_t come = made.receive(root, {only(Place::kOutput, rank)});
    made.send(root, {}, {come});
    made.receive(root, {});
    return made.program();
  }
  Ops come;
  for (int32_t peer : made.others()) made.send(peer, {input(peer)});
  made.copy(only(Place::kOutput, rank), input(rank));
  for (int32_t peer : made.others()) come.push_back(made.receive(peer, {}));
  for (int32_t peer : made.others()) made.send(peer, {}, come);
  return made.program();
}

ProgramPointer all_gather_parts(int32_t size, int32_t rank) {
  Writer made(size, rank);
  made.copy(output(rank), only(Place::kInput, rank));
  Ops come;
  for (int32_t peer : made.others()) {
    made.send(peer, {only(Place::kInput, rank)});
    int32_t from = (2 * rank + size - peer) % size;
    come.push_back(made.receive(from, {output(from)}));
  }
  made.agree(come);
  return made.program();
}

ProgramPointer reduce_scatter_parts(int32_t size, int32_t rank) {
  Writer made(size, rank);
  for (int32_t peer : made.others()) made.send(peer, {input(peer)});
  Ops last;
  if (size == 1) made.copy(only(Place::kOutput, rank), input(rank));
  for (int32_t peer : made.others()) {
    Span so_far = last.empty() ? input(rank) : only(Place::kOutput, rank);
    last = {made.reduce(peer, only(Place::kOutput, rank), so_far, last)};
  }
  made.agree(last);
  return made.program();
}

ProgramPointer point(int32_t size, int32_t rank, Kind kind, int32_t peer, uint32_t tag) {
  Program made;
  made.size = size;
  made.rank = rank;
  Spans place{only(kind == Kind::kSend ? Place::kInput : Place::kOutput, 0)};
  Op op{kind, peer, -1, tag, {}, {}, {}};
  (kind == Kind::kSend ? op.from : op.to) = std::move(place);
  made.add(std::move(op), {});
  made.liken();
  return std::make_shared<Program>(std::move(made));
}

}  // namespace pccl
