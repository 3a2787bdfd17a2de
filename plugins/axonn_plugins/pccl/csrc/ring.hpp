// Bytes between two processes of a node, through memory that both have mapped: one ring each way. The socket beside it wakes
// whoever sleeps, and tells when the other process ends.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "board.hpp"

namespace pccl {

// What both ends see of a ring; the other end may write anything here at any time.
struct RingControl {
  alignas(64) std::atomic<uint64_t> written;  // bytes since the beginning
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  alignas(64) std::atomic<uint32_t> writer_waits;
};

// One end of one direction.
class Ring {
 public:
  Ring(RingControl* control, char* data, size_t capacity) : control_(control), data_(data), capacity_(capacity) {}

  // As writev and readv; errno is EAGAIN where there is no room or nothing to read, EPROTO where the other end's count cannot be.
  // Sets `bell` where the other end asked to be woken.
  ssize_t write(const iovec* parts, int count, bool& bell);
  ssize_t read(const iovec* parts, int count, bool& bell);
  // Bytes that can be read in one piece, from `at` on; -1 as `read` where there are none.
  ssize_t ahead(const char*& at) const;
  // They have been read; whether the other end asked to be woken.
  bool skip(size_t bytes);
  bool readable() const { return control_->written.load() != own_; }
  bool writable() const { return own_ - control_->read.load() < capacity_; }

  // Whether the other end asked to be woken, and does not know yet that it is.
  bool sleeps() { return control_->reader_sleeps.load() && control_->reader_sleeps.exchange(0); }
  // Asks to be woken, or no longer.
  void sleep(bool asleep) { control_->reader_sleeps.store(asleep); }
  void wait_for_room() { control_->writer_waits.store(1); }

 private:
  void copy(uint64_t at, char* memory, size_t bytes, bool in);

  RingControl* control_;
  char* data_;
  size_t capacity_;
  uint64_t own_ = 0;  // this end's count, which the other end cannot change
};

// A link's memory, as one of its ends sees it.
class SharedMemory {
 public:
  // As map_sealed; throws for a size that cannot be, too.
  SharedMemory(int memory, bool incoming);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  Ring& in() { return in_; }
  Ring& out() { return out_; }

 private:
  SharedMemory(Mapping mapping, bool incoming);
  static Mapping map(int memory);

  Mapping mapping_;
  Ring in_, out_;
};

}  // namespace pccl
