"""Sizes of a transformer: what it has by way of parameters, and its layers as what 4D grids split."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner.layers import Attention, Between, Block, Kind, Linear, Scan


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer.

    Attributes:
        name: what a user calls it.
        layers: d.
        hidden: features of the residual stream, e.
        heads: of attention, h.
        sequence: positions of a sample, l.
        feed_forward: features within the MLP, f; 0 for 4·e.
        kv_heads: heads of keys and values; 0 for as many as `heads`.
        head_width: features of a head; 0 for e/h. With multi-latent attention, of queries and keys before the rotary ones.
        vocabulary: tokens; 0 where unknown.
        untied: whether the output layer has a table of tokens of its own.
        gated: the MLP has three matrices of f features, not two, as in Llama: then no layer has biases or dropout either.
        experts: routed experts of a sparse layer; 0 for none.
        experts_per_token: of which each position goes to so many.
        expert_feed_forward: features within one of them.
        shared_feed_forward: features of the experts that all positions go to, together.
        dense_layers: first layers without experts, which have an MLP of f features.
        sparse_every: of the other layers, every so many-th has experts.
        q_rank: features that queries are made from; 0 where they are made from the residual stream.
        kv_rank: features that keys and values are made from in multi-latent attention (DeepSeek-AI 2024, arXiv 2405.04434); 0 without.
        rope_width: rotary features besides of a query and of the one key that all heads share, likewise.
        value_width: features of a head's values; 0 for `head_width`.
        attention_gate: attention's output is multiplied by a gate, which its first matrix makes, too.
        kinds: what each layer has, a word each: ``*`` attention, ``M`` a mixer whose time grows with the positions (a state-space model, linear
            attention), ``-`` an MLP, ``E`` experts, such as ``M- M- *- M-``; empty where all have attention and an MLP, or experts as above.
        mixer_gives: features that a mixer's first matrices make of a position.
        mixer_takes: features that its last matrix takes.
        mixer_within: features that matrices between these two make of `mixer_takes`.
        mixer_heads: heads of a mixer.
        mixer_state: numbers of state for each of `mixer_takes`.
        mixer_chunk: positions that are taken at once; 0 for one after another.
        mixer_other: parameters of a mixer besides: convolutions, norms, rates of decay.
        other: parameters besides layers and tables of tokens: learned positions, what a multimodal model has for images, biases that
            are not modelled; below 0 where the model has fewer than are.
        source: where the sizes come from.

    Raises:
        ConfigError: sizes that do not go together.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    feed_forward: int = 0
    kv_heads: int = 0
    head_width: int = 0
    vocabulary: int = 0
    untied: bool = False
    gated: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    shared_feed_forward: int = 0
    dense_layers: int = 0
    sparse_every: int = 1
    q_rank: int = 0
    kv_rank: int = 0
    rope_width: int = 0
    value_width: int = 0
    attention_gate: bool = False
    kinds: str = ""
    mixer_gives: int = 0
    mixer_takes: int = 0
    mixer_within: int = 0
    mixer_heads: int = 0
    mixer_state: int = 0
    mixer_chunk: int = 0
    mixer_other: int = 0
    other: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        say = f'model "{self.name}":'
        if not self.head_width and self.hidden % self.heads:
            raise ConfigError(
                f"{say} heads = {self.heads} does not divide hidden = {self.hidden}; choose a divisor, or give head_width"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(
                f"{say} kv_heads = {self.kv_heads} does not divide heads = {self.heads}; choose a divisor"
            )
        if not self.experts:
            for key in ("experts_per_token", "expert_feed_forward", "shared_feed_forward", "dense_layers"):
                if getattr(self, key):
                    raise ConfigError(f"{say} {key} = {getattr(self, key)} is of experts; give experts, too")
        elif not (self.expert_feed_forward and 1 <= self.experts_per_token <= self.experts):
            raise ConfigError(
                f"{say} experts = {self.experts} needs expert_feed_forward, and an experts_per_token from 1 to {self.experts}; give both"
            )
        if self.dense_layers > self.layers:
            raise ConfigError(
                f"{say} dense_layers = {self.dense_layers} are more than layers = {self.layers}; give as many at most"
            )
        if self.rope_width + self.q_rank and not self.kv_rank:
            raise ConfigError(f"{say} q_rank and rope_width are of multi-latent attention; give kv_rank, too")
        if self.kinds:
            self._check_kinds(say)

    def _check_kinds(self, say: str) -> None:
        words = self.kinds.split()
        odd = next((word for word in words if not set(word) <= set("M*-E") or len(set(word)) < len(word)), None)
        if odd is not None or len(words) != self.layers:
            said = f"has {len(words)} words" if odd is None else f'has "{odd}"'
            raise ConfigError(
                f"{say} kinds {said}; write a word of M, *, - and E for each of the {self.layers} layers, such as M- or *E"
            )
        if self.mixes and not (self.mixer_gives and self.mixer_takes and self.mixer_heads):
            raise ConfigError(
                f"{say} kinds has M, which needs mixer_gives, mixer_takes and mixer_heads; give all three"
            )
        if "E" in self.kinds and not self.experts:
            raise ConfigError(f"{say} kinds has E, which needs experts; give them, too")

    @property
    def f(self) -> int:
        """Features within the MLP."""
        return self.feed_forward or 4 * self.hidden

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def q(self) -> int:
        """Features of a head's queries and keys, rotary ones included."""
        return (self.head_width or self.hidden // self.heads) + self.rope_width

    @property
    def v(self) -> int:
        """Features of a head's values."""
        return self.value_width or self.q - self.rope_width

    @property
    def latent(self) -> int:
        """Features that multi-latent attention makes of a position, which every rank of a tensor-parallel group has; 0 without."""
        return self.q_rank + self.kv_rank + self.rope_width if self.kv_rank else 0

    @property
    def attention_linears(self) -> tuple[tuple[str, int, int], ...]:
        """Name, features in and out of attention's matrices in their order; the last gives the residual stream."""
        if not self.kv_rank:
            gate = self.heads * self.v if self.attention_gate else 0
            first = [("qkv", self.hidden, self.heads * self.q + self.kv * (self.q + self.v) + gate)]
        else:
            first = [("latent", self.hidden, self.latent)]
            first += [("q", self.q_rank or self.hidden, self.heads * self.q)]
            first += [("kv", self.kv_rank, self.heads * (self.q - self.rope_width + self.v))]
        return *first, ("proj", self.heads * self.v, self.hidden)

    @property
    def matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def mixes(self) -> bool:
        """True if some layers have mixers that are no attention."""
        return "M" in self.kinds

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        if self.kinds:
            return self.having("E")
        return (self.layers - self.dense_layers) // self.sparse_every if self.experts else 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers of each kind, by the words of `kinds`, those with most first."""
        if self.kinds:
            return dict(Counter(self.kinds.split()).most_common())
        found = {"*-": self.layers - self.sparse_layers, "*E": self.sparse_layers}
        return {word: count for word, count in found.items() if count}

    def having(self, part: str) -> int:
        """Layers that have a part: ``M``, ``*``, ``-`` or ``E``."""
        return sum(count for word, count in self.counts.items() if part in word)

    @property
    def mixer_linears(self) -> tuple[tuple[str, int, int], ...]:
        """Name, features in and out of a mixer's matrices in their order; the last gives the residual stream."""
        within = (("mixer within", self.mixer_takes, self.mixer_within),) if self.mixer_within else ()
        return ("mixer in", self.hidden, self.mixer_gives), *within, ("mixer out", self.mixer_takes, self.hidden)

    @property
    def expert(self) -> int:
        """Parameters of a routed expert."""
        return self.matrices * self.hidden * self.expert_feed_forward

    @property
    def parameters(self) -> int:
        """Parameters of all layers, of the tables of tokens where the vocabulary is known, and `other`; biases and norms of experts do not count."""
        e, sparse = self.hidden, self.sparse_layers
        attention = sum(k * n for _, k, n in self.attention_linears)
        dense = self.matrices * e * self.f + (0 if self.gated or self.kinds else self.f)
        routed = self.experts * (self.expert + e) + self.matrices * e * self.shared_feed_forward
        small = self.layers * (2 if self.gated else 6) * e
        if self.kinds:
            small = e * sum(len(word) * count for word, count in self.counts.items())
        mixer = sum(k * n for _, k, n in self.mixer_linears) + self.mixer_other
        of_layers = self.having("*") * attention + self.having("M") * mixer + self.having("-") * dense + sparse * routed
        return of_layers + small + (1 + self.untied) * self.vocabulary * e + self.other

    @property
    def expert_parameters(self) -> int:
        """Parameters that are in routed experts."""
        return self.sparse_layers * self.experts * self.expert

    @property
    def active_parameters(self) -> int:
        """All but the experts that a position does not go to."""
        return self.parameters - self.sparse_layers * (self.experts - self.experts_per_token) * self.expert

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its layers, as 4D grids split them: those without and those with experts; every other linear is transposed.

        What is made of a latent is normal, too: between the two the latent changes sides.
        """
        return tuple(self._block(word, count) for word, count in self.counts.items())

    @property
    def described(self) -> str:
        """Its sizes in words."""
        experts = f", {self.experts_per_token} of {self.experts} experts" if self.experts else ""
        heads = f"{self.heads} heads"
        if self.mixes:
            heads = (
                f"attention of {heads} in {self.having('*')}"
                if self.having("*")
                else f"{self.mixer_heads} heads of mixers, no attention"
            )
        return f"{self.layers} layers, hidden {self.hidden}, {heads}{experts}"

    @property
    def sample(self) -> str:
        """The size of a sample, in words."""
        return f"{self.sequence} positions"

    @property
    def features(self) -> tuple[int, ...]:
        """Features that ranks of tensor parallelism must divide."""
        dense = (self.f,) if self.having("-") else ()
        sparse = tuple(size for size in (self.expert_feed_forward, self.shared_feed_forward) if size)
        mixers = (self.mixer_takes,) if self.mixes else ()
        return (self.hidden, *dense, *sparse, *mixers)

    @property
    def split_heads(self) -> int:
        """Heads that ranks which split heads must divide: those that attention and mixers have in common."""
        several = [*([self.heads] if self.having("*") else []), *([self.mixer_heads] if self.mixes else [])]
        return math.gcd(*several)

    @property
    def divides(self) -> tuple[tuple[int, ...], int]:
        """Features that gx and gy must divide, and heads that gx must."""
        return self.features, self.split_heads

    def _mlp(self, first: str, second: str, inner: int, copies: int = 1) -> tuple[Linear, Linear]:
        positions = self.sequence * (self.experts_per_token if copies > 1 else 1)
        return (
            Linear(first, self.hidden, (self.matrices - 1) * inner, False, positions, positions, copies=copies),
            Linear(second, inner, self.hidden, True, positions, positions, copies=copies),
        )

    def _block(self, word: str, count: int) -> Block:
        e, positions = self.hidden, self.sequence
        norms: tuple[tuple[Kind, int], ...] = len(word) * (("norm", e),)
        linears: list[Linear] = []
        of = lambda several, last: [Linear(name, k, n, name == last, positions, positions) for name, k, n in several]  # noqa: E731
        attention = self._attention() if "*" in word else None
        scan, kinds = None, list[tuple[Kind, int]]()
        if "M" in word:
            linears += of(self.mixer_linears, "mixer out")
            sizes = self.mixer_gives, self.mixer_takes, self.mixer_state, self.mixer_chunk
            scan = Scan(positions, self.mixer_heads, *sizes)
            kinds += [("gate", self.mixer_takes)]
        if attention is not None:
            linears += of(self.attention_linears, "proj")
        inner = 0
        if "E" in word:
            if self.shared_feed_forward:
                linears += self._mlp("shared fc1", "shared fc2", self.shared_feed_forward)
            linears += self._mlp("expert fc1", "expert fc2", self.expert_feed_forward, self.experts)
            inner = self.shared_feed_forward + self.experts_per_token * self.expert_feed_forward
        elif "-" in word:
            linears, inner = [*linears, *self._mlp("fc1", "fc2", self.f)], self.f
        if self.gated:
            kinds += [("gate", inner)] if inner else []
        elif self.kinds:
            kinds += [("activation", inner)] if inner else []
        else:
            kinds += [("bias", inner), ("bias", e), ("bias", e), ("activation", inner), ("dropout", inner)]
            kinds += [("dropout", e), ("dropout", e)]
        between = tuple(Between(kind, positions, features) for kind, features in (*kinds, *norms))
        return Block(tuple(linears), between, attention, count, scan)

    def _attention(self) -> Attention:
        return Attention(
            self.sequence,
            self.heads,
            self.heads if self.kv_rank else self.kv,
            self.q,
            self.value_width,
            self.kv_rank + self.rope_width,
            self.kv_rank * self.heads * (self.q - self.rope_width + self.v),
        )
