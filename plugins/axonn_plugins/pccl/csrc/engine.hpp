// Runs programs over links; one thread at a time does all communication and all sums of a process: the engine's own, or a
// caller that waits for the only call under way.
#pragma once

#include <sys/epoll.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "desk.hpp"
#include "frame.hpp"
#include "link.hpp"
#include "program.hpp"

namespace pccl {

using Done = std::function<void(const std::string& error)>;

inline constexpr uint64_t kWake = 0;  // no link has this number
inline constexpr double kMostSeconds = 1e9;  // what a clock's nanoseconds can hold
inline constexpr std::chrono::seconds kPatience{1};  // at most, before others are asked what they do
inline constexpr size_t kMostBroken = 4096;  // groups that are heard of only by their failures
inline constexpr char kStranger[] = "it sent to a group that it is not of";

// One call of this rank: a collective, or a message between two ranks, whose number is kPoints or more.
struct Run {
  uint64_t group, sequence;
  std::shared_ptr<const Program> program;
  Signature signature;
  Buffers buffers;
  std::unique_ptr<char[]> work;
  std::vector<int32_t> waits;
  std::vector<int32_t> ready;
  size_t begun = 0;  // of those
  std::vector<bool> finished;
  size_t left = 0;
  std::map<int32_t, size_t> shown;  // places on the board, by the first op that sends what lies there
  bool advancing = false, over = false;
  bool sits = false, lies = false;  // it is done at desks, and its part lies there
  int part = 0;                     // of those
  size_t inquiries = 0;
  std::chrono::duration<double> timeout;
  Clock::duration patience;
  Clock::time_point began, deadline, asks;  // when those that it waits for are asked
  int* source = nullptr;                    // of a message from any rank: where its rank in the group is put
  Done done;

  bool point() const { return sequence >= kPoints; }
  bool receives() const { return point() && program->ops[0].kind == Kind::kReceive; }
};

// Makes a link to a peer, without which a call cannot be done. Called by who serves: it must not wait for anything.
using Reach = std::function<void(int peer)>;

using Turn = std::unique_lock<std::mutex>;

// A call that was started; with the turn to serve the links, if the caller has got it.
struct Begun {
  Turn turn;
  std::shared_ptr<Run> run;
};

class Engine {
 public:
  // `most_early`: bytes of messages that nobody has asked for yet, from where on a link is not read.
  explicit Engine(size_t most_early = size_t{256} << 20);
  ~Engine();

  // Links to nodes that have not answered for so many seconds are given up.
  void give_up_after(double silence);
  // Takes memory, a descriptor, for this process' board, before there are links; throws where it is none.
  void set_board(int memory);
  // Links to and from a peer process, over connected sockets that the engine owns from here on. `process` > 0: its memory
  // may be read here (incoming), or ours there (outgoing). `memory`: a descriptor of what bytes go through instead of the
  // socket, or -1; `board`: the peer's, or -1; `boarded`: it has ours. Throws where one is none, with all closed.
  void add_outgoing(int peer, int socket, pid_t process, int memory = -1, bool boarded = false);
  void add_incoming(int peer, int socket, pid_t process, int memory = -1, int board = -1);
  // Throws in a process that was forked from the engine's.
  void check_process() const;
  // Whether there is a link to a peer still.
  bool linked(int peer);

  // A group: its members' peer numbers and global ranks, by group rank.
  void add_group(uint64_t key, std::vector<int> peers, std::vector<int> ranks, int rank, double timeout);
  void attend(uint64_t key, Reach reach);
  // Gives up what is under way in the group; `what`: this rank did; `sequence`: the last call that it began.
  void remove_group(uint64_t key, const std::string& what, uint64_t sequence);
  // The group is out of order; the others are told.
  void give_up(uint64_t key, const std::string& why);

  // Why a group is out of order, or "".
  std::string broken(uint64_t group);
  // How often this rank has asked another what it waits for.
  uint64_t questions() const { return questions_; }
  // How many parts of calls this rank has laid on its desks.
  uint64_t laid() const { return laid_; }

  // Begins a collective; `done` is called once, by the thread that serves the links. The signature's elements are those of all
  // blocks. `timeout`: in seconds, the group's where it is 0. `here`: the caller, which has nothing to do until it is done,
  // serves the links itself by `lead`, if nothing else is under way.
  Begun start(uint64_t group, uint64_t sequence, std::shared_ptr<const Program> program, Signature signature, void* input,
             void* output, double timeout, Done done, bool here = false);
  // The same with the memory of each slot. A message between two ranks has its time from `hurry` on; where it may come from
  // any, `source` is told.
  Begun start(uint64_t group, uint64_t sequence, std::shared_ptr<const Program> program, Signature signature,
             std::vector<Piece> inputs, std::vector<Piece> outputs, double timeout, Done done, bool here = false,
             int* source = nullptr);
  // Somebody waits for a message, which may take as long as the group's timeout from now on.
  void hurry(uint64_t group, uint64_t sequence);
  // Serves the links until a call is done, where the caller has got the turn to: no other thread need be woken, nor wake it. It
  // must hold no lock that others need meanwhile, such as the interpreter's.
  void lead(Begun begun);

  // This rank's next call of the group was refused before it began, as its arguments make no sense: peers that wait for it
  // there are told, if it makes no other.
  void refuse(uint64_t group, uint64_t sequence, const std::string& why);

 private:
  // Whom somebody waits for in the end, and how far that one is.
  struct Suspect {
    uint32_t rank;  // of the job
    uint32_t how;   // kSilent, it does not answer, and kElsewhere, it is waited for in another group, or neither
    uint64_t sequence;

    bool operator==(const Suspect&) const = default;
  };
  static constexpr uint32_t kSilent = 1, kElsewhere = 2;
  using Suspects = std::vector<Suspect>;
  struct State {  // what a peer said of itself
    uint64_t sequence = 0;
    Suspects suspects;
    bool known = false;
    Clock::time_point heard;
    std::optional<Clock::time_point> asked;  // and did not answer
  };
  struct Asker {  // a peer that waits for this rank
    uint64_t sequence;
    Clock::time_point asked;
    Suspects told;
  };
  struct Departure {
    uint64_t sequence;  // the last call
    std::string why;
    bool sends = true, receives = true;  // what it sent before, or took, may still be on its way
  };
  struct Group {
    std::vector<int> peers, ranks;
    std::unordered_map<int, int> places;  // of peers, in both
    int rank;
    std::chrono::duration<double> timeout;
    std::string broken;
    std::map<int, Departure> left;  // peers that have left it
    Reach reach;
    std::map<int, State> states;
    std::map<uint64_t, Asker> askers;  // by their links
    uint64_t refused = 0;  // a call of this rank's, and why
    std::string refusal;
    Clock::time_point refused_at;
    std::set<uint64_t> told;  // links, that it is out of order
  };
  struct Ended {
    uint64_t sequence;  // this rank's last call
    std::string why;    // where calls were given up
    std::set<uint64_t> told;
  };
  using Key = std::tuple<uint64_t, uint64_t, int, uint32_t>;  // group, sequence, peer, tag
  struct Posted {
    Run* run;
    int32_t op;
  };
  struct Early {  // a message that came before its operation wanted it
    Header header;
    std::vector<char> body;
    uint64_t link;
    int peer;
  };
  using Slot = std::pair<uint64_t, uint32_t>;  // group, tag

  using Order = std::tuple<uint64_t, uint64_t, int32_t>;  // sequence, group, op

  enum class Server { kThread, kCaller, kNobody };

  void post(std::function<void()> command);
  void wake();
  void loop();
  void serve(const epoll_event* events, int count);
  Turn take_over();
  Begun start(const std::shared_ptr<Run>& run, bool here);
  void launch(const std::shared_ptr<Run>& run);
  void carry_out(Run& run);
  bool near(const Run& run) const;
  // What is thrown on the way (there is no memory for a message) ends what is under way, never the process.
  template <class Step>
  void guarded(const Step& step, uint64_t link) {
    try {
      step();
    } catch (const std::exception& error) {
      failed(std::string("the engine failed: ") + error.what(), link);
    }
  }
  void failed(const std::string& why, uint64_t link);
  struct Shared {
    std::unique_ptr<SharedMemory> memory;
    std::unique_ptr<Board> board;
  };
  void add_link(int peer, int socket, pid_t process, int memory, int board, bool boarded, bool incoming);
  int wait_milliseconds();
  void expire();
  void ask();
  void ask(uint64_t group, uint64_t sequence, const Signature& signature, const std::vector<int>& peers);
  using Awaited = std::map<int, uint32_t>;  // peers, each with the first of its messages that is missing
  Awaited awaited(const Run& run) const;
  std::vector<int> next_asked(Run& run) const;
  Suspects suspected(const Group& group, uint64_t sequence, const Awaited& peers, Clock::duration patience) const;
  Suspects suspected(uint64_t group, uint64_t sequence);
  Suspects elsewhere(uint64_t group);
  static std::string in_words(const Suspects& suspects);
  void on_ask(Link& link, const Header& header);
  void on_state(const Link& link, const Header& header, const std::vector<char>& body);
  void on_left(uint64_t group, int peer, const Departure& left);
  bool in_vain(const Run& run, int peer, const Departure& left) const;
  void tell_left(Link& link, uint64_t group, uint64_t sequence);
  void answer(Link& link, const Header& header);
  void tell_all(Group& group, uint64_t key);
  std::vector<uint64_t> links_of(const Group& group) const;
  void feel_pulses();
  bool has_pulse(Link& link);
  bool knock(Link& link);
  bool poll_shared();
  bool rest();
  void awake();
  void bury();

  bool sit(Run& run);
  bool poll_desks();
  bool go_on(uint64_t group);
  void open(uint64_t key, Desks& desks);
  void call_all(const Group& group);
  void lay(Run& run, Desks& desks);
  bool arrived(const Run& run, const Desks& desks, size_t rank) const;
  bool same_header(const Run& run, const Desks& desks, size_t rank) const;
  bool agrees(const Run& run, const Desks& desks, size_t rank);
  void take(Run& run, Desks& desks);
  void rise(Run& run);
  std::vector<int> missing(const Run& run) const;
  void fail_for_lost(const Run& run);
  void leave_desk(uint64_t key, const Group& group);

  void advance(Run& run);
  void begin(Run& run, int32_t op);
  void send(Run& run, int32_t op);
  std::optional<size_t> show(Run& run, int32_t like, const Pieces& pieces);
  void owe(const Run& run);
  void settle(int peer, std::optional<uint64_t> group);
  void receive(Run& run, int32_t op);
  void receive_point(Run& run);
  Run* match(const Header& header, int peer);
  void take_point(Run& run, Early& early);
  bool may_bring(const Run& run, int peer) const;
  void finish(Run& run, int32_t op);
  void complete(Run& run);
  void fail_group(uint64_t key, const std::string& why, bool tell);
  void tell(Link& link, Frame frame, uint64_t group, uint64_t sequence, const void* body, size_t bytes);
  void tell(Link& link, uint64_t group, const std::string& why);
  void forget(Run& run);
  std::string describe(const Run& run) const;
  std::string rank_name(uint64_t group, int peer) const;
  bool is_member(uint64_t group, int peer) const;
  std::string mismatch(const Run& run, int peer, const Header& header) const;

  void on_event(uint64_t link, uint32_t events);
  void read(Link& link);
  bool on_header(Link& link);
  void place(Link& link, Run& run, int32_t op);
  void on_body(Link& link);
  void on_acknowledged(Link& link, const Header& header);
  void unlike(const Run& run, int peer, size_t bytes, size_t expected);
  bool accept(Link& link, Run& run, const Header& header, size_t expected);
  void take_early(Run& run, int32_t op, Early& early);
  void keep_early(Link& link, const Key& key, Early early);
  void drop_early(uint64_t group, std::optional<uint64_t> sequence);
  void release(const Early& early);
  bool crowded(const Link& link) const;
  void pause(Link& link, bool paused);
  void resume(int peer);
  bool read_board(Run& run, int32_t op, const std::vector<char>& row, const Link& link, const Header& header);
  void acknowledge(Link& link, Run& run, int32_t op, const Header& header);
  bool read_next();
  void read_remote(Run& run, int32_t op, const std::vector<char>& pieces, uint64_t link, const Header& header);
  void dispatch(Link& link, Message message);
  bool write(Link& link, Message& message);
  void flush(Link& link);
  void lose(uint64_t link, const std::string& why);
  void watch(const Link& link, int change);

  const size_t most_early_;
  const pid_t process_;
  std::thread thread_;
  int epoll_ = -1, wake_ = -1;
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  std::set<int> linked_;  // as outgoing_, for other threads
  std::map<uint64_t, std::string> reasons_;  // as the groups' broken, likewise
  Server server_ = Server::kThread;
  std::condition_variable thread_serves_;

  std::mutex turn_;  // held by who serves; guards all that follows; taken before mutex_
  bool stop_ = false;
  Clock::duration silence_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kSilence));
  Clock::time_point felt_;  // when links were last looked at for that
  bool asleep_ = false;  // peers were asked to wake who serves

  uint64_t next_link_ = 1;
  std::unordered_map<uint64_t, std::unique_ptr<Link>> links_;
  std::vector<Link*> shared_;    // links whose bytes go through memory
  std::vector<uint64_t> dying_;  // links that could not be written to
  std::unordered_map<int, uint64_t> outgoing_, incoming_;
  std::unordered_map<int, std::string> lost_;
  std::map<uint64_t, Group> groups_;
  std::map<uint64_t, std::string> broken_early_;
  std::map<uint64_t, std::map<int, Departure>> left_early_;
  std::string trouble_;  // the last reason why a group was out of order, and when
  Clock::time_point troubled_;
  std::map<uint64_t, Ended> removed_;
  std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<Run>> runs_;
  std::map<uint64_t, uint64_t> newest_;  // by group: sequence numbers up to here have begun
  std::map<Key, Posted> posted_;
  std::map<Key, Early> early_;
  std::map<Slot, std::list<Run*>> wanted_;   // receives of messages between two ranks, in their order
  std::map<Slot, std::list<Early>> unasked_;  // such messages that no receive has asked for, in the order in which they came
  std::map<Order, Early> ripe_;  // messages that lie elsewhere, and are wanted by now
  size_t paused_ = 0;  // links
  std::atomic<uint64_t> questions_ = 0, laid_ = 0;
  std::map<Key, Posted> unread_;  // sent as kRemote or kBoard, not acknowledged yet
  std::unique_ptr<Board> board_;
  struct Owed {
    uint64_t group;
    std::set<int> peers;
  };
  std::map<size_t, Owed> owed_;  // on it, of calls that were given up and groups that were left: who may still be reading
  std::map<uint64_t, Desks> desks_;
  std::vector<uint64_t> busy_desks_;  // groups with calls there
  std::vector<std::shared_ptr<Run>> past_;  // runs that are over, kept while a function further up may look at them
};

}  // namespace pccl
