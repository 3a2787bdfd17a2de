// SHA-256 (FIPS 180-4) and the HMAC made of it (RFC 2104), for handshakes; no library for them comes with torch.
#pragma once

#include <array>
#include <initializer_list>
#include <string_view>

namespace pccl {

using Digest = std::array<unsigned char, 32>;

inline std::string_view bytes_of(const auto& array) { return {reinterpret_cast<const char*>(array.data()), array.size()}; }

// Of the parts, one after the other.
Digest sha256(std::initializer_list<std::string_view> parts);
Digest hmac(std::string_view secret, std::initializer_list<std::string_view> parts);
// In a time that tells nothing of where they differ.
bool same_secret(std::string_view one, std::string_view other);
// So many random bytes of the kernel's.
void randomize(void* to, size_t bytes);

}  // namespace pccl
