#include "board.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pccl {
namespace {

constexpr size_t kLine = 64, kStream = 512 * 1024;  // bytes; from here on caches do not hold it anyway

}  // namespace

Mapping map_sealed(int memory, size_t least, bool writes) {
  struct stat found;
  struct statfs kind;
  int seals = fcntl(memory, F_GET_SEALS);
  bool sealed = seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW);
  bool fits = sealed && fstat(memory, &found) == 0 && fstatfs(memory, &kind) == 0 && kind.f_type == TMPFS_MAGIC &&
              found.st_size >= static_cast<off_t>(least);
  size_t bytes = fits ? found.st_size : 0;
  void* base = fits ? mmap(nullptr, bytes, PROT_READ | (writes ? PROT_WRITE : 0), MAP_SHARED, memory, 0) : MAP_FAILED;
  close(memory);
  if (base == MAP_FAILED) throw std::runtime_error("the memory of a link cannot be mapped");
  madvise(base, bytes, MADV_DONTFORK);
  return {static_cast<char*>(base), bytes};
}

Board::Board(int memory, bool own) : mapping_(map_sealed(memory, 1, own)), room_(mapping_.bytes) {
  if (mapping_.bytes < 2 * Directory::kBytes) return;
  room_ = (mapping_.bytes - Directory::kBytes) / kLine * kLine;
  directory_.emplace(mapping_.base + room_);
}

Board::~Board() { munmap(mapping_.base, mapping_.bytes); }

std::optional<size_t> Board::take(size_t bytes) {
  size_t from = 0;
  for (auto [begin, end] : taken_) {
    if (begin - from >= bytes) break;
    from = (end + kLine - 1) / kLine * kLine;
  }
  if (from > room_ || bytes > room_ - from) return std::nullopt;
  taken_[from] = from + bytes;
  return from;
}

void stream(char* to, const char* from, size_t bytes) {
#ifdef __SSE2__
  if (bytes >= kStream) {
    size_t first = -reinterpret_cast<uintptr_t>(to) % kLine;
    std::memcpy(to, from, first);
    size_t at = first;
    for (; at + kLine <= bytes; at += kLine)
      for (size_t part = 0; part < kLine; part += sizeof(__m128i))
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + part)));
    _mm_sfence();
    std::memcpy(to + at, from + at, bytes - at);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace pccl
