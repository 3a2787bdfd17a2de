#include "digest.hpp"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace pccl {
namespace {

constexpr size_t kBlock = 64;

// The standard's constants: the first 32 bits of what follows the point in the square or cube root of a prime.
constexpr uint32_t fraction_of_root(unsigned prime, int degree) {
  using Wide = unsigned __int128;
  Wide scaled = static_cast<Wide>(prime) << (32 * degree), root = 0;
  for (Wide bit = Wide{1} << 36; bit > 0; bit >>= 1) {
    Wide tried = root | bit, power = tried;
    for (int i = 1; i < degree; ++i) power *= tried;
    if (power <= scaled) root = tried;
  }
  return static_cast<uint32_t>(root);
}

template <size_t count>
constexpr std::array<uint32_t, count> roots(int degree) {
  std::array<uint32_t, count> made{};
  size_t found = 0;
  for (unsigned number = 2; found < count; ++number) {
    bool prime = true;
    for (unsigned divisor = 2; divisor * divisor <= number; ++divisor) prime &= number % divisor != 0;
    if (prime) made[found++] = fraction_of_root(number, degree);
  }
  return made;
}

constexpr auto kFirst = roots<8>(2);
constexpr auto kRounds = roots<64>(3);

class Sha256 {
 public:
  void add(std::string_view part) {
    length_ += part.size();
    while (!part.empty()) {
      size_t step = std::min(kBlock - held_, part.size());
      std::memcpy(block_ + held_, part.data(), step);
      part.remove_prefix(step);
      if ((held_ += step) == kBlock) compress();
    }
  }

  Digest end() {
    uint64_t bits = 8 * length_;
    add({"\x80", 1});
    std::memset(block_ + held_, 0, kBlock - held_);
    if (held_ > kBlock - 8) {
      compress();
      std::memset(block_, 0, kBlock);
    }
    for (int i = 0; i < 8; ++i) block_[kBlock - 1 - i] = static_cast<unsigned char>(bits >> 8 * i);
    compress();
    Digest made;
    for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<unsigned char>(state_[i / 4] >> (24 - i % 4 * 8));
    return made;
  }

 private:
  void compress() {
    uint32_t words[64];
    for (int i = 0; i < 16; ++i)
      words[i] = uint32_t{block_[4 * i]} << 24 | uint32_t{block_[4 * i + 1]} << 16 | uint32_t{block_[4 * i + 2]} << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      uint32_t early = words[i - 15], late = words[i - 2];
      words[i] = words[i - 16] + (std::rotr(early, 7) ^ std::rotr(early, 18) ^ early >> 3) + words[i - 7] +
                 (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (int i = 0; i < 64; ++i) {
      uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
      uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    size_t i = 0;
    for (uint32_t more : {a, b, c, d, e, f, g, h}) state_[i++] += more;
    held_ = 0;
  }

  std::array<uint32_t, 8> state_ = kFirst;
  unsigned char block_[kBlock];
  size_t held_ = 0;
  uint64_t length_ = 0;
};

}  // namespace

Digest sha256(std::initializer_list<std::string_view> parts) {
  Sha256 made;
  for (std::string_view part : parts) made.add(part);
  return made.end();
}

Digest hmac(std::string_view secret, std::initializer_list<std::string_view> parts) {
  std::array<unsigned char, kBlock> inner{}, outer{};
  Digest shortened;
  if (secret.size() > kBlock) {
    shortened = sha256({secret});
    secret = bytes_of(shortened);
  }
  std::memcpy(inner.data(), secret.data(), secret.size());
  outer = inner;
  for (auto& byte : inner) byte ^= 0x36;
  for (auto& byte : outer) byte ^= 0x5c;
  Sha256 made;
  made.add(bytes_of(inner));
  for (std::string_view part : parts) made.add(part);
  Digest half = made.end();
  return sha256({bytes_of(outer), bytes_of(half)});
}

bool same_secret(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  volatile unsigned char differs = 0;
  for (size_t i = 0; i < one.size(); ++i) differs = differs | (one[i] ^ other[i]);
  return differs == 0;
}

void randomize(void* to, size_t bytes) {
  // No more than 256 bytes are asked for at a time, which come whole or not at all.
  while (getrandom(to, bytes, 0) != static_cast<ssize_t>(bytes))
    if (errno != EINTR) throw std::runtime_error("the kernel gives no random numbers");
}

}  // namespace pccl
