"""Split the residual stream of a traced model: features over y and, where the code allows it, tokens over x.

With the pairs of a plan known, a rank's pass is simulated once more, now with its share of the stream: embeddings and
transposed layers give it, norms over its features take and give it. Every linear must find its share, and the model
must return what it returned. What reads the stream and ends no pair becomes a head. Values that are whole on every
rank must not flow into a share, nor shares into whole values: their gradients would be those of a part.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.rms_norm import is_rms_norm
from axonn_tp.plan.own_faults import let_out
from axonn_tp.plan.placement import kept_whole
from axonn_tp.plan.report import collapse
from axonn_tp.plan.rules import LayerPlan
from axonn_tp.plan.search.copies import is_embedding
from axonn_tp.plan.search.dependencies import Reach
from axonn_tp.plan.search.pairs import on_a_share
from axonn_tp.plan.search.runs import Cut, Local, Mismatch, Run, equal, same
from axonn_tp.plan.search.shadow import Shadow
from axonn_tp.plan.search.slopes import refuse_own_backward


@dataclass(frozen=True)
class Seat:
    """One rank's share of the stream.

    Attributes:
        grid: the grid.
        x: place on x.
        y: place on y.
        tokens: tokens, dim −2, are split over x; otherwise every x has all of them.
    """

    grid: Grid
    x: int
    y: int
    tokens: bool

    @property
    def trivial(self) -> bool:
        """True if the share is the whole stream."""
        return self.grid.gy == 1 and not (self.tokens and self.grid.gx > 1)

    def of(self, tensor: Tensor) -> Tensor:
        """The share of a whole tensor, its tokens padded with zeros."""
        tensor = tensor.chunk(self.grid.gy, -1)[self.y]
        if not self.tokens:
            return tensor
        return F.pad(tensor, (0, 0, 0, -tensor.shape[-2] % self.grid.gx)).chunk(self.grid.gx, -2)[self.x]

    def holds(self, got: Tensor, whole: Tensor) -> bool:
        """True if `got` is the share of `whole`, padding aside."""
        expected = self.of(whole)
        if got.shape != expected.shape:
            return False
        real = expected.shape[-2] if expected.dim() > 1 else 0
        if self.tokens:
            real = min(max(whole.shape[-2] - self.x * real, 0), real)
            got, expected = got[..., :real, :], expected[..., :real, :]
        return same(got, expected)


class StreamPass:
    """The answers of layers in one simulated pass on a share of the stream.

    Args:
        shadow: the model.
        run: its whole pass.
        cuts: the pairs' layers as one share.
        seat: the share of the stream.

    Attributes:
        embeddings: those that were looked into.
        heads: linears that read the stream and end no pair.
        norms: norms that read it.
    """

    def __init__(self, shadow: Shadow, run: Run, cuts: Mapping[str, Cut], seat: Seat) -> None:
        self._shadow, self._run, self._cuts, self._seat = shadow, run, cuts, seat
        self._calls: dict[str, int] = {}
        self._leaves: dict[str, list[Tensor]] = {"whole": [], "stream": [], "pair": []}
        self._parameters = {id(p): 1 << number for number, p in enumerate(shadow.model.parameters())}
        self._used = dict.fromkeys(self._leaves, 0)
        self.embeddings: set[str] = set()
        self.heads: set[str] = set()
        self.norms: set[str] = set()

    def _call(self, name: str) -> int:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        if call >= len(self._run.results[name]):
            raise Mismatch(f"{name} is called more often")
        return call

    def _answer(self, value: Tensor, kind: str) -> Tensor:
        leaf = value.detach().clone().requires_grad_()
        self._leaves[kind].append(leaf)
        return leaf.clone()

    def _pure(self, tensor: Tensor, kind: str, what: str) -> None:
        """Raise `Mismatch` where an activation of one kind was made of another: its gradient would be that of a part."""
        same_kind = {"whole", "stream"} if self._seat.trivial and kind != "pair" else {kind}
        others = [leaf for other in self._leaves.keys() - same_kind for leaf in self._leaves[other]]
        if self._shadow.reaches(tensor, others):
            raise Mismatch(f"{what} mixes whole activations with shares")
        self._used["whole" if "whole" in same_kind else kind] |= Reach(self._parameters)(tensor)

    def embedding(self, name: str, input: Tensor) -> Tensor:
        """This rank's share of what was looked up; rows must be those of the whole pass, and are not where code counts places in a share."""
        call = self._call(name)
        if not equal(input, self._run.inputs[name][call]):
            raise Mismatch(f"{name} looks other rows up on a share")
        self.embeddings.add(name)
        return self._answer(self._seat.of(self._run.results[name][call]), "stream")

    def norm(self, name: str, input: Tensor) -> Tensor | None:
        """The norm of a share, or nothing where it is given whole rows."""
        known = self.boundary(name, input)
        if known is not None:
            self.norms.add(name)
        return None if known is None else known[1]

    def boundary(self, name: str, input: Tensor) -> tuple[Tensor, Tensor] | None:
        """The whole of the share that a module is given, and its answer's share; nothing where it is given whole rows."""
        call = self._call(name)
        whole = self._run.inputs[name][call]
        if self._seat.holds(input, whole):
            self._pure(input, "stream", f"the input of {name}")
            return whole, self._answer(self._seat.of(self._run.results[name][call]), "stream")
        if input.shape != whole.shape or not same(input, whole):
            raise Mismatch(f"the input of {name} is neither whole nor a share of the stream")
        return None

    def linear(self, name: str, input: Tensor) -> Tensor:
        """A linear's answer to what it was given."""
        call, cut = self._call(name), self._cuts.get(name)
        expected, result = self._run.inputs[name][call], self._run.results[name][call]
        if cut is not None and cut.parts is None:
            if input.shape != cut.of(expected).shape or not same(input, cut.of(expected)):
                raise Mismatch(f"the input of {name} is not its share")
            self._pure(input, "pair", f"the input of {name}")
            return self._answer(self._seat.of(result), "stream")
        if self._seat.holds(input, expected):
            self._pure(input, "stream", f"the input of {name}")
            if cut is not None:
                return self._answer(cut.of(result), "pair")
            self.heads.add(name)
            return self._answer(result, "whole")
        if cut is not None or input.shape != expected.shape or not same(input, expected):
            raise Mismatch(f"the input of {name} is neither whole nor a share of the stream")
        self._pure(input, "whole", f"the input of {name}")
        return self._answer(result, "whole")

    def part(self, got: Tensor, whole: Tensor) -> Hashable:
        """A key that tells a whole tensor of a block from a share of the stream, and by its origin; nothing where it is neither."""
        kinds = tuple(kind for kind, leaves in self._leaves.items() if self._shadow.reaches(got, leaves))
        if whole.requires_grad and self._seat.holds(got, whole):
            return "share", kinds, got.requires_grad
        return ("whole", kinds, got.requires_grad) if equal(got, whole) else None

    def entering(self, tensor: Tensor, part: Hashable) -> Tensor:
        """The tensor, made of the same kinds of activations and of nothing else."""
        kinds, graded = part[1:]  # type: ignore[index]
        if not graded:
            return tensor
        if not kinds:
            return tensor.detach().clone().requires_grad_().clone()
        made = self._answer(tensor, kinds[0])
        for kind in kinds[1:]:
            made = made + self._answer(tensor.new_zeros(()), kind)
        return made

    def answer(self, whole: Tensor, part: Hashable) -> Tensor:
        """A block's answer by what it is of the whole one."""
        is_share = part[0] == "share"  # type: ignore[index]
        return self.entering(self._seat.of(whole.detach()) if is_share else whole.detach().clone(), part)

    def repeated(self, first: str, name: str, calls: Mapping[str, int]) -> None:
        """The layers of a block took part as those of one like it did."""
        for inner, number in calls.items():
            layer, like = f"{name}.{inner}", f"{first}.{inner}"
            self._calls[layer] = self._calls.get(layer, -1) + number
            for found in (self.embeddings, self.heads, self.norms):
                if like in found:
                    found.add(layer)

    def finish(self, outputs: list[Tensor]) -> None:
        """Compare what the model returned.

        Raises:
            Mismatch: it is not what the whole pass returned.
        """
        for name, results in self._run.results.items():
            if self._calls.get(name, -1) + 1 != len(results):
                raise Mismatch(f"{name} is called less often")
        if len(outputs) != len(self._run.outputs):
            raise Mismatch("the number of outputs differs")
        for got, expected in zip(outputs, self._run.outputs, strict=True):
            if got.shape != expected.shape or not same(got, expected):
                raise Mismatch("the model returns something of the stream itself, or made of all its features")
            self._pure(got, "whole", "the output")
        for (name, _), bit in zip(self._shadow.model.named_parameters(), self._parameters.values(), strict=True):
            if sum(bool(used & bit) for used in self._used.values()) > 1:
                raise Mismatch(f"{name} is used on unlike shares, or on whole activations as well")


@dataclass(frozen=True)
class Stream:
    """The layers of a split stream.

    Attributes:
        embeddings: those that start it.
        norms: those inside it.
        heads: linears that leave it.
        whole_tokens: why its tokens cannot be split over x; empty where they can.
    """

    embeddings: tuple[str, ...]
    norms: tuple[str, ...]
    heads: tuple[str, ...]
    whole_tokens: str = ""

    def plan(self) -> dict[str, LayerPlan]:
        """Its layers' part of a plan."""
        plan = {name: LayerPlan("embedding", whole_tokens=bool(self.whole_tokens)) for name in self.embeddings}
        return plan | dict.fromkeys(self.norms, LayerPlan("norm")) | dict.fromkeys(self.heads, LayerPlan("head"))

    def described(self, grid: Grid) -> str:
        """A sentence for the report."""
        told = "The stream between pairs is split, features over y"
        if grid.gx > 1:
            why = f" but all tokens on every x ({collapse(self.whole_tokens)})"
            told += why if self.whole_tokens else " and, in the scattered layout, tokens over x"
        return f"{told}."


def stream_modules(model: nn.Module, width: int) -> tuple[set[str], set[str]]:
    """Names of the embeddings and norms over `width` features that could be part of a split stream."""
    embeddings, norms, whole = set(), set(), kept_whole(model)
    for name, module in model.named_modules():
        if id(module) in whole:
            continue
        if is_embedding(module) and module.embedding_dim == width:
            if not (module.max_norm or module.scale_grad_by_freq or module.sparse):
                embeddings.add(name)
        elif isinstance(module, nn.LayerNorm):
            if tuple(module.normalized_shape) == (width,) and type(module).forward is nn.LayerNorm.forward:
                norms.add(name)
        else:
            weight = module._parameters.get("weight")
            if weight is not None and tuple(weight.shape) == (width,) and is_rms_norm(module, in_own_type=True):
                norms.add(name)
    return embeddings, norms


@dataclass(frozen=True)
class Shared:
    """The pairs as one rank has them: its place, their cuts and their counts."""

    x: int
    y: int
    cuts: dict[str, Cut]
    counts: list[Local]


def split_stream(
    model: nn.Module,
    shadow: Shadow,
    arguments: tuple[tuple, dict[str, Any]],
    grid: Grid,
    widths: set[int],
    over_x: list[Shared],
    over_both: list[Shared],
) -> Stream:
    """The split stream of a model whose pairs are known.

    Args:
        model: the serial model.
        shadow: its shadow.
        arguments: of the model's forward.
        grid: the grid.
        widths: features that pairs begin and end with.
        over_x: the ranks to simulate, with features between pairs over x, as in the replicated layout.
        over_both: the same with features between pairs over x and y where they can be.

    Raises:
        Exception: what stands against a split stream.
    """
    if len(widths) > 1:
        raise Mismatch(f"pairs begin and end with {' and '.join(map(str, sorted(widths)))} features")
    embeddings, norms = stream_modules(model, min(widths))
    if not embeddings:
        raise Mismatch("no embedding starts it")
    shadow.watch(embeddings, norms)
    run = shadow.whole("", arguments)
    for rank in over_x[:1]:
        refuse_own_backward(run, rank.cuts)
    run.settle()
    found = _simulated(shadow, run, grid, [*over_x, *over_both], False)
    if grid.gx == 1:
        return found
    try:
        other = _simulated(shadow, run, grid, over_both, True)
        problem = "other layers would be part of it"
    except Exception as error:
        let_out(error)
        other, problem = None, on_a_share(error)
    if other is not None and (other == found or grid.gy == 1):
        return other
    if grid.gy > 1:
        return replace(found, whole_tokens=problem)
    # The share is the whole: that tells nothing of who reads it, and only a head that shares a table gains.
    modules = dict(model.named_modules())
    tables = {id(modules[name].weight) for name in embeddings}
    tied = tuple(name for name in found.heads if id(modules[name].weight) in tables)
    if not tied:
        raise Mismatch(problem)
    return replace(found, norms=(), heads=tied, whole_tokens=problem)


def _simulated(shadow: Shadow, run: Run, grid: Grid, ranks: list[Shared], tokens: bool) -> Stream:
    found: set[Stream] = set()
    for rank in ranks:
        told = _pass(shadow, run, rank, Seat(grid, rank.x, rank.y, tokens))
        found.add(Stream(tuple(sorted(told.embeddings)), tuple(sorted(told.norms)), tuple(sorted(told.heads))))
    if len(found) != 1:
        raise Mismatch("ranks find different layers in it")
    return found.pop()


def _pass(shadow: Shadow, run: Run, rank: Shared, seat: Seat) -> StreamPass:
    """One rank's pass; every block has its say before it is called wrong."""
    for reuse in (True, False) if run.blocks else (False,):
        told = StreamPass(shadow, run, rank.cuts, seat)
        try:
            told.finish(shadow.seated(told, run, rank.cuts, rank.counts, reuse))
            return told
        except Exception as error:
            if not reuse:
                raise
            let_out(error)
    raise AssertionError
