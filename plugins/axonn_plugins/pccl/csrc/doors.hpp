// How processes of a job come to be linked. Whoever has something to send dials; the other side's thread answers at any time,
// without the interpreter, whatever its program is doing, so that no order of calls can lock. Both sides prove that they know
// the group's secret. Within a node the one that dials hands memory over.
//
//   hello    magic, group, who dials, a random number            to whom it dials
//   answer   a random number, proof                              back
//   proof    proof, address of a token, the token                and descriptors of memory, within a node
//   ways     how the other side will read what is sent           back; from here on the socket is a link
#pragma once

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "address.hpp"
#include "digest.hpp"
#include "engine.hpp"

namespace pccl {

using Identity = std::array<char, 16>;
using Nonce = std::array<char, 32>;

// What goes over a socket before it is a link, as it lies in memory.
struct Hello {
  static constexpr char kMagic[] = "AXPCCL01";
  std::array<char, 8> magic, group;
  Identity identity;
  Nonce nonce;
};
struct Answer {
  Nonce nonce;
  Digest proof;
};
struct Proof {
  Digest proof;
  uint64_t address;
  std::array<char, 8> token;
};
enum Way : unsigned char {
  kRead = 1,   // the receiver reads the sender's memory
  kShare = 2,  // bytes go through the memory that was handed over
  kShow = 4,   // the receiver has the sender's board
};

// Why there is no link.
struct NoLink : std::runtime_error {
  NoLink(const std::string& why, bool gone = false) : std::runtime_error(why), gone(gone) {}
  bool gone;  // the peer listens no longer, or its node does not answer: it has ended
};

class Doors {
 public:
  struct Peer {
    Identity identity;
    bool near;  // on this node
    std::string name;
    std::vector<std::pair<std::string, int>> addresses;
  };

  // Listens at this node's `hosts`, each in a port that the kernel chooses. `silence`: seconds after which a node that does not
  // answer is given up. `lets_read`: peers of the node may read this process' memory even where Yama forbids it by default.
  // Throws where it cannot.
  Doors(std::shared_ptr<Engine> engine, std::vector<std::string> hosts, double silence, bool lets_read);
  ~Doors();
  Doors(const Doors&) = delete;

  const Identity& identity() const { return identity_; }
  const std::string& name() const { return name_; }
  const std::vector<std::pair<std::string, int>>& addresses() const { return addresses_; }

  // Lets in, from now on, who knows this secret; the group's number in frames. `timeout`: for so many seconds a handshake may last.
  uint64_t join(const std::string& secret, double timeout);
  // The engine's number for a peer.
  int number(const Identity& identity);
  // Makes the link to a peer, if it is not there. Throws NoLink where that cannot be done in `timeout` seconds, or as soon as the
  // group is out of order.
  void connect(uint64_t group, const Peer& peer, double timeout);
  // Whether a peer's process has ended, as far as can be told in so many seconds.
  bool gone(const Peer& peer, double timeout);

 private:
  struct Joined {
    std::string secret;
    Clock::duration timeout;
  };
  // A handshake under way, on the side that was dialled.
  struct Stranger {
    int socket;
    bool near;
    Clock::time_point until;
    std::optional<Joined> group{};  // that it named
    std::string got{};
    std::vector<int> handed{};
    Hello hello{};
    Nonce nonce{};
  };

  void listen(const Address& address);
  void loop();
  void let_in(int listener);
  void turn_away(uint64_t id);
  void make_room();
  bool hear(Stranger& stranger);
  bool on_hello(Stranger& stranger);
  void on_proof(Stranger& stranger);

  int dial(uint64_t group, const Peer& peer, Clock::time_point until);
  void introduce(int socket, uint64_t group, const Peer& peer, int number, Clock::time_point until);
  void await(int socket, short events, uint64_t group, Clock::time_point until);
  void send_all(int socket, const void* from, size_t bytes, const std::vector<int>& handed);
  void receive_all(int socket, void* to, size_t bytes, uint64_t group, Clock::time_point until);
  Joined joined(uint64_t group);

  const std::shared_ptr<Engine> engine_;
  const double silence_;
  const bool lets_read_;
  Identity identity_;
  std::string name_;
  std::vector<Address> own_;  // that it listens at
  std::vector<std::pair<std::string, int>> addresses_;
  std::vector<int> listeners_;
  int board_ = -1, epoll_ = -1, stop_ = -1;

  std::mutex mutex_;
  std::condition_variable connected_;
  std::map<uint64_t, Joined> groups_;
  std::map<Identity, int> numbers_;
  std::set<int> connecting_;

  uint64_t next_ = 0;                      // of the thread alone, as is what follows
  std::map<uint64_t, Stranger> strangers_;  // by age
  std::thread thread_;
};

// What each side shows to know of the secret in this one conversation.
Digest proof_of(const std::string& secret, const char* side, const Hello& hello, const Identity& receiver, const Nonce& answered);

// Nameless memory of this user's that cannot change its size, or -1 where there is none to be had.
int sealed_memory(size_t bytes);

}  // namespace pccl
