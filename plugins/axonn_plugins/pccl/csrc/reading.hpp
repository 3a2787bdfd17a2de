// Whether processes of a node may read each other's memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string_view>

#include "program.hpp"

namespace pccl {

// The process at the other end of a socket within the node, as the kernel knows it; 0 for others, and where it is not to be seen.
pid_t process_of(int socket);
// Whether another process' memory can be read here: whether this is what lies there.
bool can_read(pid_t process, uint64_t address, std::string_view expected);
// Whether the kernel reads this process' own memory for others: what a device maps, or memfd_secret gives, it reads for nobody.
bool can_be_read(const Pieces& pieces);
// The nearest process that both are, or come from; 0 where there is none but the node's first.
pid_t common_ancestor(pid_t one, pid_t other);
// Where Yama keeps processes from each other's memory, lets `peer` read this one's. Yama knows one process that may, and with it
// all that come from that one: it becomes the nearest that all peers so far come from, such as the one that started the ranks.
void let_read(pid_t peer);

}  // namespace pccl
