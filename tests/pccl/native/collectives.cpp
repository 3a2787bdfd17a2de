// Whole collectives among engines of one process: collectives ROUNDS SEED
#include <functional>
#include <random>

#include "peers.hpp"

using namespace pccl;

namespace {

struct Call {
  std::vector<int32_t> input, output, wanted;
  std::string error = "never done";
};

uint64_t laid = 0;

void round(std::mt19937_64& draw) {
  int size = 1 + static_cast<int>(draw() % 6), calls = 1 + static_cast<int>(draw() % 12);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int rank = 0; rank < size; ++rank) engines.push_back(std::make_unique<Engine>(draw() % 2 ? 5000 : 1 << 28));
  connect(engines, draw() % 2 ? getpid() : 0, draw() % 2, draw() % 2);
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) ranks[rank] = rank;
  for (int rank = 0; rank < size; ++rank) engines[rank]->add_group(5, ranks, ranks, rank, 60);
  std::vector<std::vector<Call>> made(size, std::vector<Call>(calls));
  std::vector<std::vector<std::function<void(Engine&)>>> starts(size);
  std::atomic<int> left = size * calls;
  for (int call = 0; call < calls; ++call) {
    bool gather = draw() % 2;
    size_t elements = draw() % 20 == 0 ? draw() % 400000 : draw() % 3 == 0 ? draw() % 60000 : draw() % 50;
    int chunks = 1 + static_cast<int>(draw() % 3);
    if (gather) elements = elements / size * size;
    size_t each = elements / size;
    std::vector<int32_t> sum(elements);
    for (int rank = 0; rank < size; ++rank) {
      Call& one = made[rank][call];
      one.input.resize(gather ? each : elements);
      for (int32_t& value : one.input) value = static_cast<int32_t>(draw() % 1000);
      for (size_t i = 0; i < one.input.size(); ++i) sum[gather ? rank * each + i : i] += one.input[i];
      one.output.resize(elements, -1);
    }
    bool in_place = !gather && draw() % 2, desks = draw() % 2;
    for (int rank = 0; rank < size; ++rank) {
      Call& one = made[rank][call];
      one.wanted = sum;
      if (size == 1 || in_place) one.output = sum.size() && !gather ? one.input : one.output;
      auto program = std::make_shared<Program>(*(gather ? all_gather(size, rank, chunks) : all_reduce(size, rank, chunks)));
      program->desks = desks && size > 1;
      void* input = in_place ? one.output.data() : one.input.data();
      bool here = draw() % 2;
      starts[rank].push_back([=, &one, &left](Engine& engine) {
        auto kind = signature(gather ? Collective::kAllGather : Collective::kAllReduce, elements);
        auto done = [&](const std::string& error) {
          one.error = error;
          --left;
        };
        engine.lead(engine.start(5, call + 1, program, kind, input, one.output.data(), 0, done, here));
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
  for (auto& engine : engines) laid += engine->laid();
  engines.clear();
  for (auto& of : made)
    for (Call& one : of) {
      if (!one.error.empty()) std::fprintf(stderr, "%s\n", one.error.c_str());
      CHECK(one.error.empty() && one.output == one.wanted);
    }
}

// The first send of the same, found by going back from each to what wrote a block of it.
int32_t first_alike(const Program& program, int32_t index) {
  const Op& op = program.ops[index];
  for (int32_t before = index - 1; before >= 0; --before) {
    const Op& other = program.ops[before];
    if (other.kind == Kind::kSend && other.chunk == op.chunk && other.from == op.from) return first_alike(program, before);
    if (other.kind == Kind::kSend || (other.chunk != op.chunk && other.chunk >= 0 && op.chunk >= 0)) continue;
    for (const Span& to : other.to)
      for (const Span& from : op.from)
        if (to.block < from.block + from.count && from.block < to.block + to.count) return index;
  }
  return index;
}

void alike(std::mt19937_64& draw) {
  Program program{4, 0, 3, 0, 7, {}};
  for (int i = 0; i < 40; ++i) {
    int32_t first = static_cast<int32_t>(draw() % 3), chunk = static_cast<int32_t>(draw() % 4) - 1;
    std::vector<Span> spans{{Place::kOutput, first, first, static_cast<int32_t>(1 + draw() % 2)}};
    if (draw() % 4) program.add({Kind::kSend, 1, chunk, 0, {}, spans, {}}, {});
    else program.add({Kind::kReceive, 1, chunk, 0, spans, {}, {}}, {});
  }
  program.liken();
  std::vector<int32_t> counts(program.ops.size());
  for (int32_t i = 0; i < 40; ++i)
    if (program.ops[i].kind == Kind::kSend) {
      CHECK(program.ops[i].like == first_alike(program, i));
      ++counts[program.ops[i].like];
    }
  for (int32_t i = 0; i < 40; ++i) CHECK(program.ops[i].alike == counts[i]);
}

}  // namespace

void run(int, char** arguments) {
  std::mt19937_64 draw(std::strtoull(arguments[2], nullptr, 10));
  int rounds = std::atoi(arguments[1]);
  for (int i = 0; i < rounds; ++i) round(draw);
  for (int i = 0; i < rounds; ++i) alike(draw);
  CHECK(rounds < 20 || laid > 0);
  std::printf("%d rounds\n", rounds);
}
