"""Random models: several streams of unequal lengths, branches, shared and tied modules, code between layers, losses of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FORMS = ("as it is", "flattened", "length first", "checkpointed")
"""How code outside brings a stream to a block."""


class Mlp(nn.Module):
    """A pair of linears, gated or not."""

    def __init__(self, hidden: int, inner: int, gated: bool, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, bias), nn.Linear(inner, hidden, bias)
        self.gate = nn.Linear(hidden, inner, bias) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x))
        return self.down(inner if self.gate is None else inner * self.gate(x))

    def plan(self) -> dict[str, object]:
        return {"up": "normal", "down": "transposed", **({"gate": "normal"} if self.gate is not None else {})}


class Attention(nn.Module):
    """Of a stream over itself or over a memory; q, k and v in one matrix or three; fewer heads for k and v where grouped."""

    def __init__(self, hidden: int, heads: int, shared_heads: int, fused: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.width, self.fused = heads, hidden // heads, fused
        if fused:
            self.qkv = nn.Linear(hidden, 3 * hidden, bias)
        else:
            self.q = nn.Linear(hidden, hidden, bias)
            self.k, self.v = (nn.Linear(hidden, self.width * shared_heads, bias) for _ in range(2))
        self.shared_heads = shared_heads
        self.out = nn.Linear(hidden, hidden, bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(source), self.v(source))
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(-2, -3) for t in (q, k, v))
        groups = q.shape[-3] // k.shape[-3]
        k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=memory is None)
        return self.out(made.transpose(-2, -3).flatten(-2))

    def plan(self) -> dict[str, object]:
        if self.fused:
            return {"qkv": {"kind": "normal", "parts": 3, "heads": self.heads}, "out": "transposed"}
        found: dict[str, object] = {"q": {"kind": "normal", "heads": self.heads}, "out": "transposed"}
        for name in "kv":
            found[name] = {"kind": "normal", "heads": self.shared_heads}
        return found

    def cross_plan(self) -> dict[str, object]:
        found = self.plan()
        for name in "kv":
            found[name] = {"kind": "normal", "heads": self.shared_heads, "reads": "memory"}
        return found


@dataclass(frozen=True)
class Step:
    """One block at work: which module, on which stream, reading which, and in which form.

    Attributes:
        block: number of the module; one that occurs again is shared.
        stream: the stream that it adds to.
        memory: the stream that it attends to; None: its own.
        form: one of `FORMS`.
        norm: number of the norm before it; -1: none.
    """

    block: int
    stream: int
    memory: int | None
    form: str
    norm: int


@dataclass
class Drawn:
    """Parts of a random model.

    Attributes:
        hidden: features of all streams.
        vocabulary: rows of the embeddings.
        streams: number of inputs.
        floats: whether each input is of features instead of tokens.
        embeddings: which table each stream reads.
        blocks: constructors' arguments: ("mlp", ...) or ("attention", ...).
        norms: "layer" or "rms", by number.
        steps: what runs.
        heads: by stream: "tied", "own" or "none"; with "none" the stream ends as it is.
        losses: by stream: "cross entropy" or "square".
    """

    hidden: int
    vocabulary: int
    streams: int
    floats: list[bool]
    embeddings: list[int]
    blocks: list[tuple] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)


def draw(random: Random) -> Drawn:
    """A random model's description."""
    heads = random.choice((2, 4, 4, 6, 8, 12))
    hidden = heads * random.choice((1, 2, 3, 4))
    streams = random.choice((1, 1, 1, 2, 2, 3))
    floats = [random.random() < 0.2 for _ in range(streams)]
    found = Drawn(hidden, random.randint(5, 40), streams, floats, [random.randrange(streams) for _ in range(streams)])
    bias = random.random() < 0.6
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.5:
            found.blocks.append(
                ("mlp", hidden, random.choice((hidden, 2 * hidden, 24, 15)), random.random() < 0.4, bias)
            )
        else:
            fused = random.random() < 0.4
            shared = heads if fused else random.choice([n for n in range(1, heads + 1) if heads % n == 0])
            found.blocks.append(("attention", hidden, heads, shared, fused, bias))
    found.norms = [random.choice(("layer", "rms")) for _ in range(random.randint(1, 3))]
    cross: dict[int, bool] = {}
    for _ in range(random.randint(len(found.blocks), 6)):
        block = random.randrange(len(found.blocks))
        stream = random.randrange(streams)
        kind = found.blocks[block]
        able = kind[0] == "attention" and not kind[4] and streams > 1
        crossing = cross.setdefault(block, able and random.random() < 0.6)
        memory = random.randrange(streams) if crossing else None
        form = random.choice(FORMS if kind[0] == "mlp" else ("as it is", "checkpointed"))
        norm = random.randrange(-1, len(found.norms))
        found.steps.append(Step(block, stream, memory, form, norm))
    for stream in range(streams):
        tied = not floats[stream] and random.random() < 0.3
        found.heads.append("tied" if tied else random.choice(("own", "own", "none")))
        found.losses.append(random.choice(("cross entropy", "square")))
    return found


class Model(nn.Module):
    """The module of a description; its forward gives the loss."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        hidden = drawn.hidden
        self.tables = nn.ModuleList(nn.Embedding(drawn.vocabulary, hidden) for _ in range(drawn.streams))
        makers: dict[str, Callable[..., nn.Module]] = {"mlp": Mlp, "attention": Attention}
        self.blocks = nn.ModuleList(makers[kind](*rest) for kind, *rest in drawn.blocks)
        self.norms = nn.ModuleList(
            nn.LayerNorm(hidden) if kind == "layer" else nn.RMSNorm(hidden) for kind in drawn.norms
        )
        self.outputs = nn.ModuleList(nn.Linear(hidden, drawn.vocabulary, bias=False) for _ in range(drawn.streams))
        for stream, head in enumerate(drawn.heads):
            if head == "tied":
                self.outputs[stream].weight = self.tables[drawn.embeddings[stream]].weight
        self.losses = nn.ModuleList(nn.CrossEntropyLoss() for _ in range(drawn.streams))

    def forward(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        drawn = self.drawn
        streams = [
            value if drawn.floats[number] else self.tables[drawn.embeddings[number]](value)
            for number, value in enumerate(inputs)
        ]
        for step in drawn.steps:
            streams[step.stream] = streams[step.stream] + self._run(step, streams)
        total = inputs[0].new_zeros((), dtype=torch.float64)
        for number, stream in enumerate(streams):
            made = stream if drawn.heads[number] == "none" else self.outputs[number](stream)
            if drawn.losses[number] == "square" or drawn.heads[number] == "none":
                total = total + self._square(made)
            else:
                total = total + self.losses[number](made.flatten(0, -2), labels[number].flatten())
        return total

    def _square(self, made: Tensor) -> Tensor:
        # A loss by elements, so that it means the same of a share; the trainer divides it.
        return made.square().mean()

    def _run(self, step: Step, streams: list[Tensor]) -> Tensor:
        block, x = self.blocks[step.block], streams[step.stream]
        x = x if step.norm < 0 else self.norms[step.norm](x)
        given = (x,) if step.memory is None else (x, streams[step.memory])
        if step.form == "checkpointed":
            return checkpoint(block, *given, use_reentrant=False)
        if step.form == "flattened":
            return block(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if step.form == "length first":
            return block(x.transpose(0, 1)).transpose(0, 1)
        return block(*given)

    def plan(self, random: Random, whole_stream: bool) -> dict[str, object]:
        """A plan by names.

        Args:
            random: draws which of the layers that could be split are.
            whole_stream: split the stream between them as well: embeddings, norms, heads and losses.
        """
        drawn = self.drawn
        found: dict[str, object] = {}
        crossing = {step.block for step in drawn.steps if step.memory is not None}
        for number, block in enumerate(self.blocks):
            if whole_stream or random.random() < 0.85:
                layers = block.cross_plan() if number in crossing else block.plan()  # type: ignore[operator, union-attr]
                found |= {f"blocks.{number}.{name}": layer for name, layer in layers.items()}
        if not whole_stream:
            kinds = ("head", "self_contained", "replicated")
            return found | {f"outputs.{number}": random.choice(kinds) for number in range(drawn.streams)}
        found |= {"tables.*": "embedding", "norms.*": "norm"}
        for number in range(drawn.streams):
            found[f"outputs.{number}"] = "head"
            found[f"losses.{number}"] = "loss" if drawn.losses[number] == "cross entropy" else "replicated"
        return found
