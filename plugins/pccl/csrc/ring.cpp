#include "ring.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

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
  bell = control_->reader_sleeps.load() && control_->reader_sleeps.exchange(0);
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
  own_ += done;
  control_->read.store(own_);
  bell = control_->writer_waits.load() && control_->writer_waits.exchange(0);
  return static_cast<ssize_t>(done);
}

SharedMemory::Mapping SharedMemory::map(int memory) {
  struct stat found;
  struct statfs kind;
  int seals = fcntl(memory, F_GET_SEALS);
  bool sealed = seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW);
  bool fits = sealed && fstat(memory, &found) == 0 && fstatfs(memory, &kind) == 0 && kind.f_type == TMPFS_MAGIC &&
              found.st_size > static_cast<off_t>(kControls + kAnswers);
  size_t bytes = fits ? found.st_size : 0, messages = bytes - kControls - kAnswers;
  fits = fits && messages <= kMostMessages && std::has_single_bit(messages);
  void* base = fits ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0) : MAP_FAILED;
  close(memory);
  if (base == MAP_FAILED) throw std::runtime_error("the memory of a link cannot be mapped");
  madvise(base, bytes, MADV_DONTFORK);
  return {static_cast<char*>(base), bytes};
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
