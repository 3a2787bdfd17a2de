#include "frame.hpp"

#include <cstring>

namespace pccl {
namespace {

constexpr uint32_t kMagic = 0x4c434350;  // "PCCL"

template <class T>
void put(unsigned char*& to, T value) {
  std::memcpy(to, &value, sizeof value);
  to += sizeof value;
}

template <class T>
T take(const unsigned char*& from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  from += sizeof value;
  return value;
}

}  // namespace

size_t type_bytes(Type type) {
  switch (type) {
    case Type::kC128: return 16;
    case Type::kF64: case Type::kI64: case Type::kU64: case Type::kC64: return 8;
    case Type::kF32: case Type::kI32: case Type::kU32: case Type::kC32: return 4;
    case Type::kBF16: case Type::kF16: case Type::kI16: case Type::kU16: return 2;
    default: return 1;
  }
}

const char* type_name(Type type) {
  static const char* types[] = {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
                                "uint32", "uint64", "complex128", "complex64", "complex32", "float8_e4m3fn", "float8_e4m3fnuz",
                                "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bytes of another type"};
  return types[static_cast<int>(type)];
}

std::string amount(uint64_t bytes, Type type) {
  bool whole = bytes % type_bytes(type) == 0;
  return whole ? std::to_string(bytes / type_bytes(type)) + " " + type_name(type) : std::to_string(bytes) + " bytes";
}

bool Signature::operator==(const Signature& other) const {
  bool agree = collective == other.collective && type == other.type && reduction == other.reduction && schedule == other.schedule;
  bool any = collective >= Collective::kGather && collective < Collective::kEnd;
  return agree && (any || elements == other.elements);
}

std::string Signature::text() const {
  static const char* collectives[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "reduce", "gather", "scatter",
                                      "all_to_all", "all_gather of parts", "reduce_scatter of parts", "message"};
  static const char* reductions[] = {"sum", "min", "max", "product", "average", "and", "or", "xor", "weighted sum", ""};
  std::string made = collectives[static_cast<int>(collective)];
  if (collective != Collective::kBarrier) made += " of " + std::to_string(elements) + " " + type_name(type);
  if (reduction != Reduction::kNone) made += std::string(" (") + reductions[static_cast<int>(reduction)] + ")";
  if (collective == Collective::kGather || collective == Collective::kScatter)
    made += (collective == Collective::kGather ? " to rank " : " from rank ") + std::to_string(schedule) + " of the group";
  return made;
}

void Header::write(unsigned char* to) const {
  put(to, kMagic);
  put(to, frame);
  put(to, signature.collective);
  put(to, signature.type);
  put(to, signature.reduction);
  put(to, group);
  put(to, sequence);
  put(to, bytes);
  put(to, signature.elements);
  put(to, signature.schedule);
  put(to, tag);
  put(to, pieces);
  put(to, uint32_t{0});
}

std::string Header::read(const unsigned char* from) {
  if (take<uint32_t>(from) != kMagic) return "what it sent does not begin a frame";
  frame = take<Frame>(from);
  signature.collective = take<Collective>(from);
  signature.type = take<Type>(from);
  signature.reduction = take<Reduction>(from);
  group = take<uint64_t>(from);
  sequence = take<uint64_t>(from);
  bytes = take<uint64_t>(from);
  signature.elements = take<uint64_t>(from);
  signature.schedule = take<uint32_t>(from);
  tag = take<uint32_t>(from);
  pieces = take<uint32_t>(from);
  if (frame < Frame::kData || frame > Frame::kOver) return "its frame is of no known kind";
  if (signature.collective >= Collective::kEnd || signature.type >= Type::kEnd || signature.reduction >= Reduction::kEnd)
    return "its frame is of no known operation";
  if (bytes > kMostBytes) return "its frame is too long";
  if ((frame == Frame::kError || frame == Frame::kLeft) && bytes > kMostText) return "its reason is too long";
  if (frame == Frame::kError && bytes == 0) return "its reason is missing";
  if (frame == Frame::kState && (bytes > kMostRows * kRowBytes || bytes % kRowBytes)) return "its frame has no whole rows";
  bool bare = frame == Frame::kAck || frame == Frame::kAsk || frame == Frame::kOver;
  if (bare && bytes != 0) return "its frame has a body where there is none";
  if (elsewhere() != (pieces != 0) || pieces > (frame == Frame::kBoard ? 1 : kMostPieces)) return "its frame names a wrong number of pieces";
  return "";
}

uint64_t Header::body() const { return elsewhere() ? pieces * kPieceBytes : bytes; }

}  // namespace pccl
