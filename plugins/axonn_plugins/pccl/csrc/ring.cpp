#include "ring.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace pccl {
namespace {

// The memory: the rings' controls, the ring of answers, and the ring of messages, which has the rest.
constexpr size_t kControls = 4096, kAnswers = 8192, kMostMessages = size_t{1} << 24;

RingControl* control(char* base, bool answers) { return reinterpret_cast<RingControl*>(base) + (answers ? 1 : 0); }

}  // namespace

void Ring::copy(uint64_t at, char* memory, size_t bytes, bool in) {
  size_t from = at & (capacity_ - 1), first = std::min(bytes, capacity_ - from);
  if (in) {
    std::memcpy(data_ + from, memory, first);
    std::memcpy(data_, memory + first, bytes - first);
  } else {
    std::memcpy(memory, data_ + from, first);
    std::memcpy(memory + first, data_, bytes - first);
  }
}

ssize_t Ring::write(const iovec* parts, int count, bool& bell) {
  size_t waiting = own_ - control_->read.load(), done = 0;
  if (waiting > capacity_) return errno = EPROTO, -1;
  if (waiting == capacity_) return errno = EAGAIN, -1;
  for (int i = 0; i < count && waiting + done < capacity_; ++i) {
    size_t step = std::min(parts[i].iov_len, capacity_ - waiting - done);
    copy(own_ + done, static_cast<char*>(parts[i].iov_base), step, true);
    done += step;
  }
  own_ += done;
  // Before it looks whether the reader sleeps, who looks for bytes once more after saying so: one of them sees the other.
  control_->written.store(own_);
  bell = sleeps();
  return static_cast<ssize_t>(done);
}

ssize_t Ring::read(const iovec* parts, int count, bool& bell) {
  size_t there = control_->written.load() - own_, done = 0;
  if (there > capacity_) return errno = EPROTO, -1;
  if (there == 0) return errno = EAGAIN, -1;
  for (int i = 0; i < count && done < there; ++i) {
    size_t step = std::min(parts[i].iov_len, there - done);
    copy(own_ + done, static_cast<char*>(parts[i].iov_base), step, false);
    done += step;
  }
  bell = skip(done);
  return static_cast<ssize_t>(done);
}

ssize_t Ring::ahead(const char*& at) const {
  size_t there = control_->written.load() - own_, from = own_ & (capacity_ - 1);
  if (there > capacity_) return errno = EPROTO, -1;
  if (there == 0) return errno = EAGAIN, -1;
  at = data_ + from;
  return static_cast<ssize_t>(std::min(there, capacity_ - from));
}

bool Ring::skip(size_t bytes) {
  own_ += bytes;
  control_->read.store(own_);
  return control_->writer_waits.load() && control_->writer_waits.exchange(0);
}

Mapping SharedMemory::map(int memory) {
  Mapping made = map_sealed(memory, kControls + kAnswers + 1, true);
  size_t messages = made.bytes - kControls - kAnswers;
  if (messages <= kMostMessages && std::has_single_bit(messages)) return made;
  munmap(made.base, made.bytes);
  throw std::runtime_error("the memory of a link has no such size");
}

SharedMemory::SharedMemory(int memory, bool incoming) : SharedMemory(map(memory), incoming) {}

SharedMemory::SharedMemory(Mapping mapping, bool incoming)
    : mapping_(mapping),
      in_(incoming ? Ring(control(mapping.base, false), mapping.base + kControls + kAnswers, mapping.bytes - kControls - kAnswers)
                   : Ring(control(mapping.base, true), mapping.base + kControls, kAnswers)),
      out_(incoming ? Ring(control(mapping.base, true), mapping.base + kControls, kAnswers)
                    : Ring(control(mapping.base, false), mapping.base + kControls + kAnswers, mapping.bytes - kControls - kAnswers)) {}

SharedMemory::~SharedMemory() { munmap(mapping_.base, mapping_.bytes); }

}  // namespace pccl
