// Good and bad frames to an engine with work under way: fuzz FRAMES SEED
#include <algorithm>
#include <cstring>
#include <random>

#include "direct.hpp"
#include "peers.hpp"

using namespace pccl;

namespace {

constexpr int kSize = 3;  // ranks; the engine is rank 0, and what the others send is made here
constexpr uint64_t kGroups[] = {11, 12, 13, 14};  // two are known, one is removed at once, one is never made

std::mt19937_64 draw;
uint64_t below(uint64_t end) { return draw() % end; }

struct Bytes : std::vector<char> {
  void add(const void* from, size_t bytes) {
    const char* at = static_cast<const char*>(from);
    insert(end(), at, at + bytes);
  }
};

Bytes frame(const Header& header, const void* body) {
  Bytes made;
  made.resize(Header::kBytes);
  header.write(reinterpret_cast<unsigned char*>(made.data()));
  if (header.body() && body) made.add(body, header.body());
  return made;
}

struct Call {
  std::vector<int32_t> data, wanted;
  std::atomic<int> done = 0;
  std::string error;
};

// The end of a link that is not the engine's: a socket, and perhaps memory.
struct End {
  int socket = -1;
  std::unique_ptr<SharedMemory> shared;
  char* raw = nullptr;  // the same memory once more, to be scribbled on
  static constexpr size_t kRaw = 4096;

  ~End() { clear(); }
  void clear() {
    if (socket >= 0) close(socket);
    if (raw) munmap(raw, kRaw);
    socket = -1, raw = nullptr;
    shared.reset();
  }
  // A new link; what the engine needs of it.
  std::pair<int, int> renew(bool incoming, bool clean) {
    clear();
    auto [here, there] = pair_of_sockets();
    socket = here;
    if (below(2)) return {there, -1};
    int memory = memory_of_link(clean ? 1 << 18 : 16384);  // where nothing goes wrong, all that is not asked for yet must fit
    raw = static_cast<char*>(mmap(nullptr, kRaw, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
    CHECK(raw != MAP_FAILED);
    shared = std::make_unique<SharedMemory>(dup(memory), incoming);
    return {there, memory};
  }
  void ring() const { [[maybe_unused]] ssize_t sent = ::send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }
  ssize_t put(const char* from, size_t bytes) {
    if (!shared) return ::send(socket, from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    bool bell = false;
    iovec part{const_cast<char*>(from), bytes};
    ssize_t sent = shared->out().write(&part, 1, bell);
    if (bell || below(50) == 0) ring();
    return sent;
  }
  void drain() {
    char scrap[65536];
    if (socket < 0) return;
    while (recv(socket, scrap, sizeof scrap, MSG_DONTWAIT) > 0) {}
    bool bell = false;
    iovec part{scrap, sizeof scrap};
    while (shared && shared->in().read(&part, 1, bell) > 0) {}
    if (bell) ring();
  }
};

constexpr size_t kOnBoard = 32768;  // bytes

class Episode {
 public:
  explicit Episode(bool clean) : clean_(clean), engine_(std::make_unique<Engine>(below(3) ? 1 << 20 : 1500)) {
    for (int peer = 1; peer < kSize; ++peer) {
      reconnect_in(peer);
      reconnect_out(peer);
    }
    for (uint64_t group : {kGroups[0], kGroups[1], kGroups[2]}) engine_->add_group(group, {0, 1, 2}, {0, 1, 2}, 0, 30);
    engine_->remove_group(kGroups[2], "does not want it", 0);
    if (!clean_ && below(2)) engine_->refuse(kGroups[below(2)], 4 + below(5), "makes no sense");
    for (Point& each : points_) pass(each);
    for (auto& call : calls_) call = std::make_unique<Call>();
    for (size_t i = 0; i < std::size(calls_); ++i) prepare(i);
  }

  // How many frames were sent.
  int run() {
    std::shuffle(frames_.begin(), frames_.end(), draw);
    int sent = 0;
    size_t next_call = 0;
    for (auto& [peer, bytes] : frames_) {
      while (next_call < std::size(calls_) && below(6) == 0) start(next_call++);
      if (!clean_)
        for (; below(8) >= calm_; ++sent) disturb();
      deliver(peer, bytes);
      ++sent;
    }
    while (next_call < std::size(calls_)) start(next_call++);
    if (clean_)
      for (auto& call : calls_)
        while (call->done == 0) drain(), std::this_thread::yield();
    return sent;
  }

  // The engine's end gives up what is under way.
  void end() {
    engine_.reset();
    for (Point& each : points_) CHECK(each.done == (clean_ ? 0 : 1));
    for (auto& call : calls_) {
      CHECK(call->done == 1);
      if (clean_ && !call->error.empty()) std::fprintf(stderr, "%s\n", call->error.c_str());
      if (clean_) CHECK(call->error.empty() && call->data == call->wanted);
    }
  }

  std::unique_ptr<Call> calls_[6];
  struct Point {
    std::vector<int32_t> data = std::vector<int32_t>(below(3) ? 5 : below(40000));
    int source = -1;
    std::atomic<int> done = 0;
  } points_[6];
  uint64_t point_ = kPoints;

 private:
  // A message to or from a peer, which the clean episodes do not have.
  void pass(Point& each) {
    if (clean_) return;
    bool sends = below(2);
    int peer = sends || below(2) ? 1 + static_cast<int>(below(2)) : -1;
    auto program = point(kSize, 0, sends ? Kind::kSend : Kind::kReceive, peer, static_cast<uint32_t>(below(3)));
    std::vector<Piece> memory{{reinterpret_cast<char*>(each.data.data()), each.data.size() * 4}};
    engine_->start(kGroups[below(2)], ++point_, program, {Collective::kPoint, Type::kI32, Reduction::kNone, each.data.size()},
                   sends ? memory : std::vector<Piece>{}, sends ? std::vector<Piece>{} : memory, 0, [&each](const std::string&) { ++each.done; },
                   false, &each.source);
    if (below(2)) engine_->hurry(kGroups[below(2)], point_);
  }

  // Call i of group i % 2: its data, and what the peers send for it.
  void prepare(size_t i) {
    Call& call = *calls_[i];
    size_t elements = below(4) ? below(40) : below(9000);
    call.data.resize(elements, 1);
    call.wanted.resize(elements);
    Header header;
    header.frame = Frame::kData;
    header.signature = signature(Collective::kAllReduce, elements);
    header.group = kGroups[i % 2];
    header.sequence = i / 2 + 1;
    for (int peer = 1; peer < kSize; ++peer)
      for (size_t block : {size_t{0}, static_cast<size_t>(peer)}) {
        size_t first = first_of(elements, kSize, block), end = first_of(elements, kSize, block + 1);
        std::vector<int32_t> values(end - first);
        for (int32_t& value : values) value = static_cast<int32_t>(below(1000));
        for (size_t k = first; k < end; ++k) call.wanted[k] += values[k - first] + (block == 0 && peer == 1);
        header.tag = block == 0 ? 0 : 1;
        header.bytes = values.size() * 4;
        frames_.emplace_back(peer, frame(header, values.data()));
      }
  }

  void start(size_t i) {
    Call& call = *calls_[i];
    bool hasty = !clean_ && below(10) == 0;
    engine_->start(kGroups[i % 2], i / 2 + 1, all_reduce(kSize, 0, 1), signature(Collective::kAllReduce, call.data.size()),
                  call.data.data(), call.data.data(), hasty ? 0.0005 : 0, [&call](const std::string& error) {
                    call.error = error;
                    ++call.done;
                  });
  }

  void reconnect_in(int peer) {
    auto [socket, memory] = in_[peer].renew(false, clean_);
    engine_->add_incoming(peer, socket, !clean_ && below(2) ? getpid() : 0, memory, below(2) ? memory_of_link(kOnBoard) : -1);
  }
  void reconnect_out(int peer) {
    auto [socket, memory] = out_[peer].renew(true, clean_);
    engine_->add_outgoing(peer, socket, !clean_ && below(2) ? 1 : 0, memory);
  }

  void drain() {
    for (End& end : out_) end.drain();
    for (End& end : in_)
      if (end.shared) end.drain();
  }

  void deliver(int peer, const Bytes& bytes) {
    drain();
    size_t at = 0;
    for (int tries = 0; at < bytes.size() && (clean_ || tries < 50); ++tries) {
      size_t step = below(3) ? bytes.size() - at : 1 + below(bytes.size() - at);
      ssize_t sent = in_[peer].put(bytes.data() + at, step);
      if (sent > 0) at += sent;
      else if (!clean_ && errno != EAGAIN) return reconnect_in(peer);
      else std::this_thread::yield();
    }
    if (at < bytes.size()) reconnect_in(peer);  // cut off
  }

  // A frame of known form with fields drawn from few values, so that many of them mean something.
  Header plausible() {
    Header header;
    uint64_t kind = below(44);
    header.frame = kind == 0 ? Frame::kError : kind < 4 ? Frame::kRemote : kind < 6 ? Frame::kBoard : kind < 8 ? Frame::kAck : kind < 11 ? Frame::kAsk : kind < 13 ? Frame::kState : kind < 14 ? Frame::kLeft : kind < 15 ? Frame::kOver : Frame::kData;
    const Call& like = *calls_[below(6)];
    header.signature = signature(Collective::kAllReduce, like.data.size());
    if (below(8) == 0) header.signature.elements = below(50);
    if (below(8) == 0) header.signature.collective = static_cast<Collective>(below(static_cast<uint64_t>(Collective::kEnd)));
    header.group = kGroups[below(4)];
    header.sequence = below(4) ? below(9) : kPoints + below(9);
    if (header.sequence >= kPoints) header.signature = {Collective::kPoint, Type::kI32, Reduction::kNone, below(3) ? 5 : below(40)};
    header.tag = static_cast<uint32_t>(below(4));
    bool bare = header.frame == Frame::kAck || header.frame == Frame::kAsk || header.frame == Frame::kOver;
    bool exact = header.sequence >= kPoints && below(4);
    header.bytes = bare ? 0 : exact ? header.signature.elements * 4 : header.frame == Frame::kLeft ? below(60) : header.frame == Frame::kState ? below(5) * Header::kRowBytes : below(3) ? first_of(like.data.size(), kSize, 1) * 4 : below(5000);
    if (header.frame == Frame::kRemote) header.pieces = 1 + static_cast<uint32_t>(below(3));
    if (header.frame == Frame::kBoard) header.pieces = 1;
    return header;
  }

  Bytes body(const Header& header) {
    static const std::vector<char> memory(40000, 1);
    Bytes made;
    if (header.frame == Frame::kRemote) {
      for (uint32_t i = 0; i < header.pieces; ++i) {
        uint64_t share = i + 1 < header.pieces ? 0 : header.bytes;
        uint64_t row[2] = {below(4) ? reinterpret_cast<uintptr_t>(memory.data()) : draw(), below(4) ? share : below(7) ? below(99) : draw()};
        made.add(row, sizeof row);
      }
    } else if (header.frame == Frame::kBoard) {
      uint64_t row[2] = {below(4) ? below(kOnBoard) : draw(), below(9) ? header.bytes : draw()};
      made.add(row, sizeof row);
    } else if (header.frame == Frame::kState) {
      for (uint64_t i = 0; i < header.bytes / Header::kRowBytes; ++i) {
        uint64_t row[2] = {below(3) ? below(4) : draw(), below(9)};
        made.add(row, sizeof row);
      }
    } else {
      for (uint64_t i = 0; i < header.bytes && header.bytes < 100000; ++i) made.push_back(static_cast<char>(draw()));
    }
    made.resize(std::min<uint64_t>(header.body(), 100000));
    return made;
  }

  void disturb() {
    int peer = 1 + static_cast<int>(below(kSize - 1));
    Bytes bytes;
    switch (below(13)) {
      case 12: {  // on the counts of shared memory, without a frame
        End& end = (below(2) ? in_ : out_)[peer];
        for (uint64_t left = end.raw ? 1 + below(3) : 0; left > 0; --left) end.raw[below(512)] = static_cast<char>(draw());
        if (end.raw) end.ring();
        return;
      }
      case 0:  // of any bytes
        for (uint64_t left = 1 + below(200); left > 0; --left) bytes.push_back(static_cast<char>(draw()));
        break;
      case 1:  // a right one with a few bits changed
        bytes = frames_[below(frames_.size())].second;
        for (uint64_t left = 1 + below(3); left > 0; --left) bytes[below(below(2) ? Header::kBytes : bytes.size())] ^= static_cast<char>(1 << below(8));
        break;
      case 2:  // a right one, cut off
        bytes = frames_[below(frames_.size())].second;
        bytes.resize(below(bytes.size()));
        deliver(peer, bytes);
        return reconnect_in(peer);
      case 3:  // a right one, once more
        bytes = frames_[below(frames_.size())].second;
        break;
      case 4: {  // to the wrong side of a link
        Header header = plausible();
        if (below(4)) header.frame = Frame::kAck, header.bytes = header.pieces = 0;
        bytes = frame(header, nullptr);
        if (out_[peer].put(bytes.data(), bytes.size()) < 0 || below(20) == 0) reconnect_out(peer);
        return;
      }
      default: {
        Header header = plausible();
        Bytes content = body(header);
        bytes = frame(header, nullptr);
        bytes.add(content.data(), content.size());
      }
    }
    deliver(peer, bytes);
  }

  const bool clean_;
  const uint64_t calm_ = 1 + below(7);
  End in_[kSize], out_[kSize];
  std::vector<std::pair<int, Bytes>> frames_;
  std::unique_ptr<Engine> engine_;
};

// The parser alone.
void parse(int frames) {
  unsigned char bytes[Header::kBytes];
  for (int i = 0; i < frames; ++i) {
    Header header;
    header.write(bytes);
    for (uint64_t left = below(12); left > 0; --left) bytes[below(Header::kBytes)] = static_cast<unsigned char>(draw());
    if (!header.read(bytes).empty()) continue;
    CHECK(!header.signature.text().empty() && header.body() <= Header::kMostBytes);
    CHECK(header.frame == Frame::kData || header.body() <= Header::kMostPieces * Header::kPieceBytes);
  }
}

}  // namespace

void run(int, char** arguments) {
  int frames = std::atoi(arguments[1]), episodes = 0;
  draw.seed(std::strtoull(arguments[2], nullptr, 10));
  parse(frames);
  int failed = 0, fine = 0;
  for (int sent = 0; sent < frames; ++episodes) {
    auto episode = std::make_unique<Episode>(episodes % 4 == 0);
    sent += episode->run();
    episode->end();
    for (auto& call : episode->calls_) call->error.empty() ? ++fine : ++failed;
  }
  std::printf("%d frames, %d episodes, %d calls done, %d given up\n", frames, episodes, fine, failed);
}
