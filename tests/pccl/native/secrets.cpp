// Digests of texts of many lengths, and what processes have in common: secrets MOST_LENGTH; secrets PROCESS PROCESS
#include <cstdio>
#include <cstdlib>
#include <string>

#include "digest.hpp"
#include "reading.hpp"

void run(int count, char** arguments) {
  if (count == 3) {
    std::printf("%d\n", pccl::common_ancestor(std::atoi(arguments[1]), std::atoi(arguments[2])));
    return;
  }
  std::string text;
  for (int length = 0; length <= std::atoi(arguments[1]); ++length) {
    std::string_view whole = text, first = whole.substr(0, length / 3);
    for (auto made : {pccl::sha256({first, whole.substr(first.size())}), pccl::hmac(text, {text, "part"})}) {
      for (unsigned char byte : made) std::printf("%02x", byte);
      std::printf(pccl::same_secret(pccl::bytes_of(made), pccl::bytes_of(pccl::sha256({text}))) ? " same\n" : " other\n");
    }
    text += static_cast<char>(length * 37);
  }
}
