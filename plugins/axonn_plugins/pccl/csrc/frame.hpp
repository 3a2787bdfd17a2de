// What goes over a link: a header of fixed size, then its body.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pccl {

enum class Frame : uint8_t {
  kData = 1,    // body: the bytes of a message
  kRemote = 2,  // body: `pieces` × (address, bytes) in the sender's memory, which the receiver reads itself
  kAck = 3,     // no body: a message that says where it lies, or that one rank sends another, was taken
  kError = 4,   // body: why the sender gave the operation up
  kAsk = 5,     // no body: the sender has waited long in a call
  kBoard = 6,   // body: where on the sender's board it lies; else as kRemote
  kState = 7,   // the answer to kAsk, by the last call that the sender has begun; body: rows of whom it waits for in the end
  kLeft = 8,    // the sender has left the group after this call; body: what it was told of another group shortly before, if anything
  kOver = 9,    // no body: the sender has read a kError, and from there on nothing of the group
};

enum class Collective : uint8_t {
  kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier, kReduce, kGather, kScatter, kAllToAll,
  kAllGatherParts, kReduceScatterParts,  // of lists, whose parts may have any lengths
  kPoint,                                // a message from one rank to another, which is no call of all
  kEnd
};
enum class Type : uint8_t {
  kF64, kF32, kBF16, kF16, kI64, kI32, kI16, kI8, kU8, kBool, kU16, kU32, kU64,
  kC128, kC64, kC32, kF8E4M3, kF8E4M3Z, kF8E5M2, kF8E5M2Z, kF8E8M0,  // are moved, not added up
  kOther,                                                            // counted in bytes
  kEnd
};
enum class Reduction : uint8_t { kSum, kMin, kMax, kProduct, kAverage, kAnd, kOr, kXor, kWeighted, kNone, kEnd };

// Calls that are no collectives have numbers of their own, from here on.
inline constexpr uint64_t kPoints = uint64_t{1} << 63;

// What the ranks of an operation must agree on; every message carries it.
struct Signature {
  Collective collective = Collective::kBarrier;
  Type type = Type::kU8;
  Reduction reduction = Reduction::kNone;
  uint64_t elements = 0;
  uint32_t schedule = 0;  // a digest of algorithm and chunks, or the root

  // Each rank's own affair are its elements in calls whose messages may have any lengths: those must agree two by two.
  bool operator==(const Signature& other) const;
  std::string text() const;
};

struct Header {
  static constexpr size_t kBytes = 56;
  static constexpr uint64_t kMostBytes = uint64_t{1} << 40;
  static constexpr uint64_t kMostText = 4096;
  static constexpr uint32_t kMostPieces = 4096;
  static constexpr size_t kPieceBytes = 16, kRowBytes = 16;
  static constexpr size_t kMostRows = 64;

  Frame frame = Frame::kAck;
  Signature signature;
  uint64_t group = 0;
  uint64_t sequence = 0;
  uint64_t bytes = 0;  // of the message (of the text in kError)
  uint32_t tag = 0;
  uint32_t pieces = 0;

  void write(unsigned char* to) const;
  // Reads and checks; the reason why it is refused, or "".
  std::string read(const unsigned char* from);
  uint64_t body() const;
  // Whether the body says where the message is.
  bool elsewhere() const { return frame == Frame::kRemote || frame == Frame::kBoard; }
};

size_t type_bytes(Type type);
const char* type_name(Type type);
// So many bytes of it, in words.
std::string amount(uint64_t bytes, Type type);

}  // namespace pccl
