// Messages that came before their operations wanted them.
#include <sys/epoll.h>

#include <algorithm>
#include <climits>

#include "engine.hpp"

namespace pccl {
namespace {

// With what keeping it costs, so that empty messages count too.
size_t weight(size_t body) { return body + 256; }

}  // namespace

void Engine::take_early(Run& run, int32_t index, Early& early) {
  const Op& op = run.program->ops[index];
  Pieces to = run.buffers.pieces(op.to, op.chunk, run.program->chunks);
  if (early.header.elsewhere()) {
    ripe_.emplace(Order{run.sequence, run.group, index}, std::move(early));
    return;
  }
  if (early.header.bytes != to.bytes()) return unlike(run, early.peer, early.header.bytes, to.bytes());
  if (op.kind == Kind::kReceive) {
    copy(Cursor(std::move(to)), Cursor(Pieces(early.body.data(), early.body.size())));
  } else {
    Sink sums;
    sums.kind = Sink::Kind::kReduce;
    sums.left = early.body.size();
    sums.to = Cursor(std::move(to));
    sums.from = Cursor(run.buffers.pieces(op.from, op.chunk, run.program->chunks));
    sums.type = run.signature.type;
    sums.reduction = run.signature.reduction;
    sums.pour(early.body.data(), early.body.size());
  }
  finish(run, index);
}

void Engine::keep_early(Link& link, const Key& key, Early early) {
  size_t bytes = weight(early.body.size());
  if (std::get<1>(key) >= kPoints) unasked_[{early.header.group, early.header.tag}].push_back(std::move(early));
  else if (!early_.emplace(key, std::move(early)).second) return lose(link.id, "it sent one message twice");
  link.held += bytes;
}

void Engine::drop_early(uint64_t group, std::optional<uint64_t> sequence) {
  auto at = early_.lower_bound(Key{group, sequence.value_or(0), INT_MIN, 0});
  while (at != early_.end() && std::get<0>(at->first) == group && std::get<1>(at->first) == sequence.value_or(std::get<1>(at->first))) {
    release(at->second);
    at = early_.erase(at);
  }
  if (sequence) return;
  for (auto& [id, link] : links_) {
    if (!link->in_body || link->header.group != group) continue;
    link->sink.kind = Sink::Kind::kDiscard;  // its rest is still to come
    link->sink.own = {};
  }
  auto unasked = unasked_.lower_bound({group, 0});
  while (unasked != unasked_.end() && unasked->first.first == group) {
    for (const Early& early : unasked->second) release(early);
    unasked = unasked_.erase(unasked);
  }
}

void Engine::release(const Early& early) {
  auto link = links_.find(early.link);
  if (link == links_.end()) return;
  link->second->held -= weight(early.body.size());
  if (link->second->paused && !crowded(*link->second)) pause(*link->second, false);
}

// Whether a link has brought so much ahead of its time that the rest can wait. It cannot where an operation waits for the
// peer: its message may be behind those that nobody has asked for, or half here.
bool Engine::crowded(const Link& link) const {
  bool wanted = link.in_body && (link.sink.kind == Sink::Kind::kPlace || link.sink.kind == Sink::Kind::kReduce);
  if (wanted || link.held + link.sink.own.size() <= most_early_ || link.hung_up) return false;
  for (auto& [key, posted] : posted_)
    if (std::get<2>(key) == link.peer) return false;
  for (auto& [slot, runs] : wanted_)
    if (std::ranges::any_of(runs, [&](Run* run) { return may_bring(*run, link.peer); })) return false;
  return true;
}

void Engine::pause(Link& link, bool paused) {
  if (link.paused == paused) return;
  link.paused = paused;
  paused ? ++paused_ : --paused_;
  watch(link, EPOLL_CTL_MOD);
}

void Engine::resume(int peer) {
  if (paused_ == 0) return;
  for (auto& [id, link] : links_)
    if (link->peer == peer) pause(*link, false);
}

}  // namespace pccl
