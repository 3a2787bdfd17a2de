// Calls whose messages go straight to where they belong, among engines of one process: exchanges ROUNDS SEED
#include <functional>
#include <random>

#include "direct.hpp"
#include "peers.hpp"

using namespace pccl;

namespace {

using Block = std::vector<int32_t>;
using Blocks = std::vector<Block>;

struct Call {
  Blocks input, output, wanted;
  std::string error = "never done";
  int source = -1, from = -1;
};

std::vector<Piece> pieces(Blocks& blocks) {
  std::vector<Piece> made;
  for (Block& block : blocks) made.push_back({reinterpret_cast<char*>(block.data()), block.size() * sizeof(int32_t)});
  return made;
}

void round(std::mt19937_64& draw) {
  int size = 1 + static_cast<int>(draw() % 5), calls = 1 + static_cast<int>(draw() % 10);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int rank = 0; rank < size; ++rank) engines.push_back(std::make_unique<Engine>(draw() % 2 ? 5000 : 1 << 28));
  connect(engines, draw() % 2 ? getpid() : 0, draw() % 2, draw() % 2);
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) ranks[rank] = rank;
  for (int rank = 0; rank < size; ++rank) engines[rank]->add_group(5, ranks, ranks, rank, 60);
  std::vector<std::vector<Call>> made(size, std::vector<Call>(calls));
  std::vector<std::vector<std::function<void(Engine&)>>> starts(size);
  std::atomic<int> left = 0;
  std::vector<uint64_t> points(size, kPoints);
  uint64_t sequence = 0;
  size_t most = draw() % 8 == 0 ? 90000 : 60;
  auto some = [&] {
    Block block(draw() % most);
    for (int32_t& value : block) value = static_cast<int32_t>(draw() % 1000);
    return block;
  };
  for (int call = 0; call < calls; ++call) {
    // What is sent, by sender and receiver.
    std::vector<Blocks> sent(size, Blocks(size));
    int kind = static_cast<int>(draw() % (size > 1 ? 6 : 5)), root = static_cast<int>(draw() % size), other = (root + 1) % size;
    bool same = kind == 3 || kind == 4;  // of all lengths, a receiver's
    for (int to = 0; to < size; ++to) {
      Block first = some();
      for (int from = 0; from < size; ++from) {
        sent[from][to] = some();
        if (same) sent[from][to].resize(first.size());
      }
    }
    Collective collectives[] = {Collective::kAllToAll, Collective::kGather, Collective::kScatter, Collective::kReduceScatterParts, Collective::kReduceScatterParts, Collective::kPoint};
    uint64_t number = kind == 5 ? 0 : ++sequence;
    uint32_t tag = draw() % 2;
    bool any = draw() % 2;
    for (int rank = 0; rank < size; ++rank) {
      Call& one = made[rank][call];
      ProgramPointer program;
      Reduction reduction = same ? Reduction::kSum : Reduction::kNone;
      uint64_t mine = number;
      if (kind == 0) {
        program = all_to_all(size, rank);
        one.input = sent[rank];
        for (int from = 0; from < size; ++from) one.wanted.push_back(sent[from][rank]);
      } else if (kind == 1) {
        program = gather(size, rank, root);
        one.input = {sent[rank][root]};
        for (int from = 0; rank == root && from < size; ++from) one.wanted.push_back(sent[from][root]);
      } else if (kind == 2) {
        program = scatter(size, rank, root);
        if (rank == root) one.input = sent[root];
        one.wanted = {sent[root][rank]};
      } else if (same) {
        program = reduce_scatter_parts(size, rank);
        one.input = sent[rank];
        Block sum(sent[0][rank].size());
        for (int from = 0; from < size; ++from)
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += sent[from][rank][i];
        one.wanted = {sum};
      } else {  // from root to other
        if (rank != root && rank != other) {
          one.error = "";
          continue;
        }
        mine = ++points[rank];
        if (rank == root) one.input = {sent[root][other]};
        else one.wanted = {sent[root][other]}, one.from = any ? root : -1;
        program = point(size, rank, rank == root ? Kind::kSend : Kind::kReceive, rank == root ? other : any && size == 2 ? -1 : root, tag);
        if (!(any && size == 2)) one.from = -1;
      }
      one.output.resize(one.wanted.size());
      for (size_t i = 0; i < one.wanted.size(); ++i) one.output[i].resize(one.wanted[i].size(), -1);
      size_t elements = one.input.empty() ? one.wanted[0].size() : one.input[0].size();
      Signature what{collectives[kind], Type::kI32, reduction, elements, static_cast<uint32_t>(kind == 1 || kind == 2 ? root : 0)};
      bool here = kind != 5 && draw() % 2;
      ++left;
      starts[rank].push_back([=, &one, &left](Engine& engine) {
        auto done = [&](const std::string& error) {
          one.error = error;
          --left;
        };
        engine.lead(engine.start(5, mine, program, what, pieces(one.input), pieces(one.output), 0, done, here,
                                 kind == 5 && one.from >= 0 ? &one.source : nullptr));
      });
    }
  }
  std::vector<std::thread> callers;
  for (int rank = 0; rank < size; ++rank)
    callers.emplace_back([&, rank] {
      for (auto& start : starts[rank]) start(*engines[rank]);
    });
  for (std::thread& caller : callers) caller.join();
  while (left > 0) usleep(200);
  engines.clear();
  for (auto& of : made)
    for (Call& one : of) {
      if (!one.error.empty()) std::fprintf(stderr, "%s\n", one.error.c_str());
      CHECK(one.error.empty() && one.output == one.wanted && one.source == one.from);
    }
}

}  // namespace

void run(int, char** arguments) {
  std::mt19937_64 draw(std::strtoull(arguments[2], nullptr, 10));
  int rounds = std::atoi(arguments[1]);
  for (int i = 0; i < rounds; ++i) round(draw);
  std::printf("%d rounds\n", rounds);
}
