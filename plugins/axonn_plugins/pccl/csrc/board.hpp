// Memory of one process that others of its node have mapped too: what goes to several of them is laid out here once, and each
// copies it from here in a way that is easy on the processor's caches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
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

inline constexpr uint64_t kNoDesk = ~uint64_t{0} - 1;

// At a board's end: where the desk of each group is, or that there is none. A group has as long a desk on all ranks as it lives.
class Directory {
 public:
  static constexpr size_t kBytes = 4096;
  explicit Directory(char* at) : rows_(reinterpret_cast<Row*>(at)) {}

  // Whether there is room. Once there was none nothing is listed any more, whatever is struck: others may have seen that there was
  // none before they look for a group that comes later.
  bool list(uint64_t group, uint64_t place) {
    Row& full = rows_[0];
    for (size_t row = 1; row < kRows && full.place.load() == 0; ++row) {
      if (rows_[row].group.load() != 0) continue;
      rows_[row].place.store(place + 1);
      rows_[row].group.store(group);
      return true;
    }
    full.place.store(1);
    return false;
  }
  // Where it is; kNoDesk, or nothing where that is not known yet.
  std::optional<uint64_t> find(uint64_t group) const {
    bool full = rows_[0].place.load() != 0;
    for (size_t row = 1; row < kRows; ++row)
      if (rows_[row].group.load() == group) return rows_[row].place.load() - 1;
    return full ? std::optional(kNoDesk) : std::nullopt;
  }
  void strike(uint64_t group) {
    for (size_t row = 1; row < kRows; ++row)
      if (rows_[row].group.load() == group) rows_[row].group.store(0);
  }

 private:
  struct Row {
    std::atomic<uint64_t> group, place;
  };
  static constexpr size_t kRows = kBytes / sizeof(Row);
  Row* rows_;
};

class Board {
 public:
  // As map_sealed.
  Board(int memory, bool own);
  ~Board();
  Board(const Board&) = delete;

  // Of a board that has room for one.
  std::optional<Directory>& directory() { return directory_; }
  // Where there is room for so many bytes, if anywhere.
  std::optional<size_t> take(size_t bytes);
  void give_back(size_t at) { taken_.erase(at); }
  char* at(size_t offset) const { return mapping_.base + offset; }
  bool has(size_t offset, size_t bytes) const { return offset <= mapping_.bytes && bytes <= mapping_.bytes - offset; }

 private:
  Mapping mapping_;
  std::optional<Directory> directory_;
  size_t room_;
  std::map<size_t, size_t> taken_;  // ends, by where they begin
};

// As memcpy. What is large does not go through the caches, where the processor can do so.
void stream(char* to, const char* from, size_t bytes);

}  // namespace pccl
