// One rank's part of a schedule, as plugins/pccl/program.py makes it.
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
};

struct Op {
  Kind kind;
  int32_t peer, chunk;
  uint32_t tag;
  std::vector<Span> to, from;
  std::vector<int32_t> before;  // ops that wait for this one
  int32_t waits = 0;            // for how many this one waits
};

struct Piece {
  char* at;
  size_t bytes;
};

size_t total(const std::vector<Piece>& pieces);

struct Program {
  int32_t size = 0, rank = 0, chunks = 1, work_slots = 0;
  uint32_t digest = 0;
  std::vector<Op> ops;

  // From the flat lists of program.py; throws std::invalid_argument where they are not a program.
  static Program parse(int32_t size, int32_t rank, int32_t chunks, int32_t work_slots, uint32_t digest,
                       const std::vector<int32_t>& ops, const std::vector<int32_t>& spans, const std::vector<int32_t>& after);
};

// Where the blocks of one run lie.
struct Buffers {
  char *input = nullptr, *output = nullptr, *work = nullptr;
  bool whole_input = false, whole_output = false;  // all blocks, or the rank's own
  size_t element = 1;                              // bytes
  std::vector<size_t> starts;                      // of each block, in elements, and the end
  size_t longest = 0;                              // block, in elements

  // Memory of spans, in order; neighbours are joined.
  std::vector<Piece> pieces(const std::vector<Span>& spans, int32_t chunk, int32_t chunks) const;
};

}  // namespace pccl
