// Who has to have waited for whom: clocks of streams and of the host, and what each has done to every piece of memory.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace late {

// How much of every timeline has been waited for: number 0 is the host's, others are those of streams.
class Clock {
 public:
  uint64_t& operator[](size_t line) {
    if (line >= seen_.size()) seen_.resize(line + 1);
    return seen_[line];
  }
  uint64_t at(size_t line) const { return line < seen_.size() ? seen_[line] : 0; }
  void join(const Clock& other) {
    for (size_t line = 0; line < other.seen_.size(); ++line) (*this)[line] = std::max(at(line), other.seen_[line]);
  }

 private:
  std::vector<uint64_t> seen_;
};

constexpr size_t kHost = 0;
inline size_t line_of(c10::StreamId stream) { return static_cast<size_t>(stream) + 1; }
inline std::string name_of(size_t line) { return line == kHost ? "the host" : "stream " + std::to_string(line - 1); }

struct Access {
  size_t line;
  uint64_t time;
  size_t begin, end;  // bytes of the block
  bool writes;
  const char* what;
};

struct Block {
  size_t bytes;
  size_t home;  // whose memory it is: a stream's, or the host's where it is pinned
  std::vector<Access> accesses;
  std::set<size_t> recorded;
};

// One process's device. Whoever would read too early, on a machine whose streams run as late as they may, is told so at once.
class Tracker {
 public:
  static Tracker& get() {
    static auto* tracker = new Tracker();  // outlives all tensors
    return *tracker;
  }

  c10::StreamId make_stream() {
    std::lock_guard lock(mutex_);
    return next_++;
  }

  // What is on a stream by now, or what the host knows.
  Clock now(size_t line) {
    std::lock_guard lock(mutex_);
    return clocks_[line];
  }
  bool host_knows(size_t line, uint64_t time) {
    std::lock_guard lock(mutex_);
    return clocks_[kHost].at(line) >= time;
  }
  void wait(size_t line, const Clock& event) {
    std::lock_guard lock(mutex_);
    clocks_[line].join(event);
  }

  // The host waits, for a stream or for all of them.
  void host_waits(size_t line, const char* what) {
    std::lock_guard lock(mutex_);
    counted(what);
    clocks_[kHost].join(clocks_[line]);
  }
  void host_waits_for_all(const char* what) {
    std::lock_guard lock(mutex_);
    counted(what);
    for (size_t line = 1; line <= static_cast<size_t>(next_); ++line) clocks_[kHost].join(clocks_[line]);
  }
  void host_waits_for(const Clock& event, const char* what) {
    std::lock_guard lock(mutex_);
    counted(what);
    clocks_[kHost].join(event);
  }
  void stalls(const char* what) {
    std::lock_guard lock(mutex_);
    counted(what);
  }
  std::map<std::string, int64_t> waits() {
    std::lock_guard lock(mutex_);
    return waits_;
  }
  void forbid(bool forbidden) {
    std::lock_guard lock(mutex_);
    forbidden_ = forbidden;
    waits_.clear();
  }

  void allocated(void* data, size_t bytes, size_t home) {
    std::lock_guard lock(mutex_);
    uint64_t time = tick(home);
    if (home != kHost) reuse(home);
    blocks_[reinterpret_cast<uintptr_t>(data)] = {bytes, home, {{home, time, 0, bytes, true, "its allocation"}}, {}};
  }
  // The memory may go to the next allocation on its stream, which need not wait for what others still do with it.
  void freed(void* data) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(reinterpret_cast<uintptr_t>(data));
    if (found == blocks_.end()) return;
    Block& block = found->second;
    Clock kept;  // the allocator waits for what is by now on the streams that it was told of
    for (size_t line : block.recorded) kept.join(clocks_[line]);
    if (block.home != kHost)
      for (const Access& access : block.accesses)
        if (access.line != block.home && kept.at(access.line) < access.time) let_go_[block.home].push_back(access);
    blocks_.erase(found);
  }
  void record(const void* data, size_t line) {
    std::lock_guard lock(mutex_);
    if (Block* block = find(data, nullptr)) block->recorded.insert(line);
  }
  bool pinned(const void* data) {
    std::lock_guard lock(mutex_);
    Block* block = find(data, nullptr);
    return block && block->home == kHost;
  }

  // An operation is put on a stream, or the host does one; returns its time.
  uint64_t begin(size_t line) {
    std::lock_guard lock(mutex_);
    return tick(line);
  }
  void touch(size_t line, uint64_t time, const void* data, size_t bytes, bool writes, const char* what) {
    if (!bytes) return;
    std::lock_guard lock(mutex_);
    size_t begin = 0;
    Block* block = find(data, &begin);
    if (!block) return;
    size_t end = begin + bytes;
    const Clock& seen = clocks_[line];
    auto known = [&](const Access& access) { return access.line == line || seen.at(access.line) >= access.time; };
    for (const Access& access : block->accesses)
      if (access.begin < end && begin < access.end && (writes || access.writes) && !known(access)) {
        std::string words = std::string(what) + (writes ? " writes" : " reads") + " on " + name_of(line) + " what " + access.what +
                            (access.writes ? " wrote" : " read") + " on " + name_of(access.line) + ", and has not waited for it";
        races_.push_back(words);
        TORCH_CHECK(false, "race: ", words);
      }
    auto& all = block->accesses;
    all.erase(std::remove_if(all.begin(), all.end(),
                             [&](const Access& access) {
                               bool inside = begin <= access.begin && access.end <= end;
                               return inside && known(access) && (writes || (!access.writes && access.line == line));
                             }),
              all.end());
    all.push_back({line, time, begin, end, writes, what});
  }

  // Races so far, also those whose error nobody heard.
  std::vector<std::string> races() {
    std::lock_guard lock(mutex_);
    return std::exchange(races_, {});
  }

 private:
  uint64_t tick(size_t line) {
    if (line != kHost) clocks_[line].join(clocks_[kHost]);
    return ++clocks_[line][line];
  }
  void reuse(size_t home) {
    std::vector<Access> before = std::exchange(let_go_[home], {});
    for (const Access& access : before)
      if (clocks_[home].at(access.line) < access.time) {
        std::string words = std::string("memory that ") + access.what + " uses on " + name_of(access.line) + " was freed and is " +
                            name_of(home) + "'s again, which has not waited for it, nor was it told by record_stream";
        races_.push_back(words);
        TORCH_CHECK(false, "race: ", words);
      }
  }
  Block* find(const void* data, size_t* offset) {
    auto address = reinterpret_cast<uintptr_t>(data);
    auto above = blocks_.upper_bound(address);
    if (above == blocks_.begin()) return nullptr;
    auto& [start, block] = *--above;
    if (address >= start + block.bytes) return nullptr;
    if (offset) *offset = address - start;
    return &block;
  }
  void counted(const char* what) {
    ++waits_[what];
    TORCH_CHECK(!forbidden_, "the host waits for the device (", what, "), where nothing may");
  }

  std::mutex mutex_;
  c10::StreamId next_ = 1;
  std::map<size_t, Clock> clocks_;
  std::map<uintptr_t, Block> blocks_;
  std::map<size_t, std::vector<Access>> let_go_;
  std::vector<std::string> races_;
  std::map<std::string, int64_t> waits_;
  bool forbidden_ = false;
};

// The calling thread's stream.
inline thread_local c10::StreamId current = 0;

}  // namespace late
