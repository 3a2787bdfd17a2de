// Memory of one process that others of its node have mapped too: what goes to several of them is laid out here once, and each
// copies it from here in a way that is easy on the processor's caches.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace pccl {

struct Mapping {
  char* base;
  size_t bytes;
};

// Maps memory, a descriptor that it closes. Throws where it is not sealed memory of at least so many bytes: a file that shrinks
// would end this process.
Mapping map_sealed(int memory, size_t least, bool writes);

class Board {
 public:
  // As map_sealed.
  Board(int memory, bool own) : mapping_(map_sealed(memory, 1, own)) {}
  ~Board();
  Board(const Board&) = delete;

  // Where there is room for so many bytes, if anywhere.
  std::optional<size_t> take(size_t bytes);
  void give_back(size_t at) { taken_.erase(at); }
  char* at(size_t offset) const { return mapping_.base + offset; }
  bool has(size_t offset, size_t bytes) const { return offset <= mapping_.bytes && bytes <= mapping_.bytes - offset; }

 private:
  Mapping mapping_;
  std::map<size_t, size_t> taken_;  // ends, by where they begin
};

// As memcpy. What is large does not go through the caches, where the processor can do so.
void stream(char* to, const char* from, size_t bytes);

}  // namespace pccl
