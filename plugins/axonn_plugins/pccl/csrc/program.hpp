// One rank's part of a schedule, as plugins/axonn_plugins/pccl/program.py makes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pccl {

enum class Kind : int32_t { kSend, kReceive, kReduce, kCopy };
enum class Place : int32_t { kInput, kOutput, kWork };

struct Span {
  Place place;
  int32_t slot, block, count;

  bool operator==(const Span&) const = default;
};

struct Op {
  Kind kind;
  int32_t peer, chunk;
  uint32_t tag;
  std::vector<Span> to, from;
  std::vector<int32_t> before;  // ops that wait for this one
  int32_t waits = 0;            // for how many this one waits
  int32_t like = -1;            // of sends: the first one of the same data
  int32_t alike = 0;            // of that: how many there are
};

struct Piece {
  char* at;
  size_t bytes;
};

// Neighbours are joined. The first few need no memory of their own.
class Pieces {
 public:
  Pieces() = default;
  Pieces(char* at, size_t bytes) { add(at, bytes); }
  void add(char* at, size_t bytes);
  size_t size() const { return count_; }
  const Piece* begin() const { return count_ > kFew ? many_.data() : few_; }
  const Piece* end() const { return begin() + count_; }
  size_t bytes() const;

 private:
  static constexpr size_t kFew = 2;
  Piece few_[kFew] = {};
  size_t count_ = 0;
  std::vector<Piece> many_;
};

struct Program {
  int32_t size = 0, rank = 0, chunks = 1, work_slots = 0;
  uint32_t digest = 0;
  std::vector<Op> ops;
  bool desks = false;  // it may be done at desks instead, as all ranks are on a node

  // From the flat lists of program.py; throws std::invalid_argument where they are not a program.
  static Program parse(int32_t size, int32_t rank, int32_t chunks, int32_t work_slots, uint32_t digest,
                       const std::vector<int32_t>& ops, const std::vector<int32_t>& spans, const std::vector<int32_t>& after);
  // One more, which waits for earlier ones; its number.
  int32_t add(Op op, const std::vector<int32_t>& after);
  // Finds out which sends are of the same data; to be called when all ops are there.
  void liken();
};

// Where the blocks of one run lie: one after the other from `input` and `output` on, or slot by slot in `inputs` and `outputs`.
struct Buffers {
  char *input = nullptr, *output = nullptr, *work = nullptr;
  std::vector<Piece> inputs, outputs;
  bool whole_input = false, whole_output = false;  // all blocks, or the rank's own
  size_t element = 1;                              // bytes
  std::vector<size_t> starts;                      // of each block, in elements, and the end
  size_t longest = 0;                              // block, in elements

  // Memory of spans, in order.
  Pieces pieces(const std::vector<Span>& spans, int32_t chunk, int32_t chunks) const;
};

}  // namespace pccl
