#include "program.hpp"

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
    Op op{static_cast<Kind>(row[0]), row[1], row[3], static_cast<uint32_t>(row[2]), {}, {}, {}, row[8]};
    op.to = spans_of(spans, row[4], row[5], size, work_slots);
    op.from = spans_of(spans, row[6], row[7], size, work_slots);
    if (!op.to.empty() && !op.from.empty() && blocks_of(op.to) != blocks_of(op.from)) refuse("blocks");
    if (next + row[8] > after.size()) refuse("order");
    for (int32_t k = 0; k < row[8]; ++k) {
      int32_t first = after[next++];
      // An op waits for earlier ones only, so nothing can wait for itself.
      if (first < 0 || static_cast<size_t>(first) >= i) refuse("order");
      made.ops[first].before.push_back(static_cast<int32_t>(i));
    }
    made.ops.push_back(std::move(op));
  }
  return made;
}

size_t total(const std::vector<Piece>& pieces) {
  size_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.bytes;
  return sum;
}

std::vector<Piece> Buffers::pieces(const std::vector<Span>& spans, int32_t chunk, int32_t chunks) const {
  std::vector<Piece> made;
  for (const Span& span : spans) {
    for (int32_t i = 0; i < span.count; ++i) {
      size_t length = starts[span.block + i + 1] - starts[span.block + i];
      size_t from = chunk < 0 ? 0 : length * chunk / chunks;
      size_t to = chunk < 0 ? length : length * (chunk + 1) / chunks;
      if (from == to) continue;
      size_t slot = static_cast<size_t>(span.slot) + i;
      char* base;
      if (span.place == Place::kWork) {
        base = work + slot * longest * element;
      } else {
        bool whole = span.place == Place::kInput ? whole_input : whole_output;
        base = (span.place == Place::kInput ? input : output) + (whole ? starts[slot] * element : 0);
      }
      Piece piece{base + from * element, (to - from) * element};
      if (!made.empty() && made.back().at + made.back().bytes == piece.at)
        made.back().bytes += piece.bytes;
      else
        made.push_back(piece);
    }
  }
  return made;
}

}  // namespace pccl
