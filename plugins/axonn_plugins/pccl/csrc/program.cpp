#include "program.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace pccl {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("not a program: " + what); }

std::vector<Span> spans_of(const std::vector<int32_t>& flat, int32_t first, int32_t count, int32_t size, int32_t work_slots) {
  if (first < 0 || count < 0 || (static_cast<size_t>(first) + count) * 4 > flat.size()) refuse("spans");
  std::vector<Span> made;
  for (int32_t i = first; i < first + count; ++i) {
    const int32_t* row = &flat[static_cast<size_t>(i) * 4];
    Span span{static_cast<Place>(row[0]), row[1], row[2], row[3]};
    int64_t slots = span.place == Place::kWork ? work_slots : size;
    bool inside = row[0] >= 0 && row[0] <= 2 && span.slot >= 0 && span.block >= 0 && span.count >= 1 &&
                  int64_t{span.slot} + span.count <= slots && int64_t{span.block} + span.count <= size;
    if (!inside) refuse("span");
    made.push_back(span);
  }
  return made;
}

std::vector<int32_t> blocks_of(const std::vector<Span>& spans) {
  std::vector<int32_t> made;
  for (const Span& span : spans)
    for (int32_t i = 0; i < span.count; ++i) made.push_back(span.block + i);
  return made;
}

}  // namespace

Program Program::parse(int32_t size, int32_t rank, int32_t chunks, int32_t work_slots, uint32_t digest,
                       const std::vector<int32_t>& ops, const std::vector<int32_t>& spans, const std::vector<int32_t>& after) {
  constexpr size_t kRow = 9;
  if (size < 1 || rank < 0 || rank >= size || chunks < 1 || work_slots < 0 || ops.size() % kRow) refuse("sizes");
  Program made{size, rank, chunks, work_slots, digest, {}};
  size_t next = 0;
  for (size_t i = 0; i < ops.size() / kRow; ++i) {
    const int32_t* row = &ops[i * kRow];
    bool local = row[0] == static_cast<int32_t>(Kind::kCopy);
    if (row[0] < 0 || row[0] > 3 || row[2] < 0 || row[3] < -1 || row[3] >= chunks || row[8] < 0) refuse("op");
    if (!local && (row[1] < 0 || row[1] >= size || row[1] == rank)) refuse("peer");
    Op op{static_cast<Kind>(row[0]), row[1], row[3], static_cast<uint32_t>(row[2]), {}, {}, {}};
    op.to = spans_of(spans, row[4], row[5], size, work_slots);
    op.from = spans_of(spans, row[6], row[7], size, work_slots);
    if (!op.to.empty() && !op.from.empty() && blocks_of(op.to) != blocks_of(op.from)) refuse("blocks");
    if (next + row[8] > after.size()) refuse("order");
    std::vector<int32_t> waits;
    for (int32_t k = 0; k < row[8]; ++k) {
      int32_t first = after[next++];
      // An op waits for earlier ones only, so nothing can wait for itself.
      if (first < 0 || static_cast<size_t>(first) >= i) refuse("order");
      waits.push_back(first);
    }
    made.add(std::move(op), waits);
  }
  made.liken();
  return made;
}

int32_t Program::add(Op op, const std::vector<int32_t>& after) {
  int32_t index = static_cast<int32_t>(ops.size());
  for (int32_t first : after) ops[first].before.push_back(index);
  op.waits = static_cast<int32_t>(after.size());
  ops.push_back(std::move(op));
  return index;
}

// Finds of each send the first one of what it sends, since it was last written. Input and output may be one memory, so blocks count.
void Program::liken() {
  std::map<std::pair<int32_t, std::vector<int32_t>>, int32_t> sent;  // the last send of a chunk of spans
  std::vector<int32_t> written(static_cast<size_t>(size) * (chunks + 1), -1);  // what last wrote a block's chunk, or all of it
  auto row = [&](int32_t block) { return written.begin() + static_cast<size_t>(block) * (chunks + 1); };
  for (int32_t index = 0; index < static_cast<int32_t>(ops.size()); ++index) {
    Op& op = ops[index];
    for (int32_t block : blocks_of(op.to)) row(block)[op.chunk + 1] = index;
    if (op.kind != Kind::kSend) continue;
    std::vector<int32_t> key;
    for (const Span& span : op.from) key.insert(key.end(), {static_cast<int32_t>(span.place), span.slot, span.block, span.count});
    auto [before, first] = sent.try_emplace({op.chunk, std::move(key)}, index);
    int32_t last = -1;
    for (int32_t block : blocks_of(op.from)) {
      auto of = row(block);
      last = std::max(last, op.chunk < 0 ? *std::max_element(of, of + chunks + 1) : std::max(of[0], of[op.chunk + 1]));
    }
    op.like = first || before->second < last ? index : ops[before->second].like;
    before->second = index;
    ++ops[op.like].alike;
  }
}

void Pieces::add(char* at, size_t bytes) {
  if (bytes == 0) return;
  Piece* last = count_ == 0 ? nullptr : count_ > kFew ? &many_.back() : &few_[count_ - 1];
  // As numbers: what a peer says of its memory need be no addresses.
  if (last && reinterpret_cast<uintptr_t>(last->at) + last->bytes == reinterpret_cast<uintptr_t>(at)) {
    last->bytes += bytes;
    return;
  }
  if (count_ == kFew) many_.assign(few_, few_ + kFew);
  if (count_ < kFew) few_[count_] = {at, bytes};
  else many_.push_back({at, bytes});
  ++count_;
}

size_t Pieces::bytes() const {
  size_t sum = 0;
  for (const Piece& piece : *this) sum += piece.bytes;
  return sum;
}

Pieces Buffers::pieces(const std::vector<Span>& spans, int32_t chunk, int32_t chunks) const {
  Pieces made;
  for (const Span& span : spans) {
    const std::vector<Piece>& slots = span.place == Place::kInput ? inputs : outputs;
    for (int32_t i = 0; i < span.count; ++i) {
      if (span.place != Place::kWork && !slots.empty()) {
        const Piece& whole = slots[static_cast<size_t>(span.slot) + i];
        made.add(whole.at, whole.bytes);
        continue;
      }
      size_t length = starts[span.block + i + 1] - starts[span.block + i];
      size_t from = chunk < 0 ? 0 : length * chunk / chunks;
      size_t to = chunk < 0 ? length : length * (chunk + 1) / chunks;
      size_t slot = static_cast<size_t>(span.slot) + i;
      char* base;
      if (span.place == Place::kWork) {
        base = work + slot * longest * element;
      } else {
        bool whole = span.place == Place::kInput ? whole_input : whole_output;
        base = (span.place == Place::kInput ? input : output) + (whole ? starts[slot] * element : 0);
      }
      made.add(base + from * element, (to - from) * element);
    }
  }
  return made;
}

}  // namespace pccl
