"""Small copies of experts with random weights, which are asked what they do: no name, and no form of weights, is to be believed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ted_moe.adapters.lists import EACH
from ted_moe.adapters.local import Local

_LAST = re.compile(r"(^|[._])(down|w2|wo|out|output|fc2|c_proj)(_|$|\.)|down_proj")
_TOKENS, _AT_ONCE, _ROWS = 5, 8, 24
_COPIED = 2**28
"""Elements of which random copies are made at most."""


@dataclass(frozen=True)
class Cut:
    """The cut of one parameter between the experts' ranks.

    Attributes:
        dim: split over the tensor ranks; None: it is not.
        parts: equal parts of that dim, each split by itself.
        once: added to a sum over the tensor ranks, so that one of them adds it.
        common: one for all experts.
    """

    dim: int | None = None
    parts: int = 1
    once: bool = False
    common: bool = False


@dataclass(frozen=True)
class Experts:
    """An experts module; parameters of experts in lists are seen as stacks of all experts' (`lists.stacks`).

    Attributes:
        name: in the model.
        module: the experts.
        count: how many there are, E.
        features: of a token, M.
        cuts: by parameter, for experts that are not split.
        shapes: of the parameters.
        lists: prefixes of the names of the lists that experts are in.
        refusal: why it is not understood.
        arguments: what its forward calls hidden states, indices and weights.
        calls_every: experts in lists are run without tokens, too, so that they have a gradient of zeros.
    """

    name: str
    module: nn.Module
    count: int = 0
    features: int = 0
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    refusal: str | None = None
    arguments: tuple[str, ...] = ()
    calls_every: bool = False


def _draw(experts: Experts, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random parameters of so many experts."""
    drawn = {}
    for name, whole in experts.shapes.items():
        shape = list(whole)
        if not experts.cuts[name].common:
            shape[0] = shape[0] // experts.count * count
        drawn[name] = torch.randn(shape, generator=generator) / max([1, *shape][-1], 1) ** 0.5
    return drawn


@torch.no_grad()
def sums_its_experts(experts: Experts) -> bool:
    """True if a small copy gives, of tokens with two experts each, the weighted sum of its outputs with one."""
    generator = torch.Generator().manual_seed(0)
    parameters = _draw(experts, 2, generator)
    code = Local(experts.module, (experts.count, 2), lists=experts.lists)
    tokens = torch.randn(_TOKENS, experts.features, generator=generator)
    indices = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]])
    weights = torch.rand(_TOKENS, 2, generator=generator)
    try:
        whole = code(parameters, False, tokens, indices, weights)
        alone = [code(parameters, False, tokens, indices[:, k : k + 1], torch.ones(_TOKENS, 1)) for k in range(2)]
        same = whole.shape == tokens.shape and all(one.shape == tokens.shape for one in alone)
        return same and _close(whole, sum(weights[:, k : k + 1] * one for k, one in enumerate(alone)))
    except Exception:  # whatever others' code raises when it is given what it does not take
        return False


def _equal_experts(experts: Experts, number: int, seed: int) -> dict[str, Tensor]:
    """Parameters of so many experts of the same random weights, without a copy of them where that can be."""
    drawn = _draw(experts, 1, torch.Generator().manual_seed(seed))
    made = {}
    for name, tensor in drawn.items():
        if experts.cuts[name].common:
            made[name] = tensor
        elif experts.shapes[name][0] == experts.count:
            made[name] = tensor.expand(number, *tensor.shape[1:])
        else:  # rows, of which no view repeats one expert's
            made[name] = tensor.repeat(number, *[1] * (tensor.dim() - 1))
    return made


def _each(experts: Experts, views: bool = True) -> int:
    """Elements of an expert; without `views` those of which no view repeats one expert's."""
    named = {name: shape for name, shape in experts.shapes.items() if not experts.cuts[name].common}
    return sum(math.prod(shape) // experts.count for shape in named.values() if views or shape[0] != experts.count)


@torch.no_grad()
def goes_by_weights(experts: Experts) -> bool:
    """True if experts of equal weights give a token the same whatever their number, and however many there are."""
    module, count = experts.module, experts.count
    if _each(experts, False) * count > _COPIED:
        return True
    token = torch.randn(1, experts.features, generator=torch.Generator().manual_seed(3))
    weight = torch.ones(1, 1)
    try:
        code, parameters = Local(module, (count, count), lists=experts.lists), _equal_experts(experts, count, 2)
        first = Local(module, (count, 1), lists=experts.lists)
        for one in (code, first):
            one.tell_apart(count)
        expected = first(_equal_experts(experts, 1, 2), False, token, torch.zeros(1, 1, dtype=torch.int64), weight)
        chunks = torch.arange(count)[:, None].split(_AT_ONCE)
        outputs = [
            code(parameters, False, token.expand(len(some), -1), some, weight.expand(len(some), 1)) for some in chunks
        ]
        return all(_close(got, expected.expand_as(got)) for got in outputs)
    except Exception:  # as above
        return False


@torch.enable_grad()
def differentiated(experts: Experts) -> tuple[bool, str | None]:
    """Try a backward pass of tokens that all go to the first of two experts.

    Returns:
        True if the other one has a gradient all the same, of zeros, where experts are in lists: optimizers decay its weights then; and why experts
        cannot be dealt out.
    """
    drawn = _draw(experts, 2, torch.Generator().manual_seed(6))
    leaves: Any = {
        name: [one.clone().requires_grad_() for one in p] if EACH in name else p.requires_grad_()
        for name, p in drawn.items()
    }
    tokens = torch.ones(_TOKENS, experts.features, requires_grad=True)
    try:
        with torch.random.fork_rng([]):
            code = Local(experts.module, (experts.count, 2), lists=experts.lists)
            route = torch.zeros(_TOKENS, 1, dtype=torch.int64), torch.ones(_TOKENS, 1)
            code(leaves, True, tokens, *route).sum().backward()
    except AttributeError:  # of parameters that are there in a forward alone
        return False, (
            "computes again in backward, as with torch.utils.checkpoint around each expert, when another rank's experts are not there; put the "
            "checkpoint around the mixture, or around its layer"
        )
    except Exception:  # as above; some products have no derivative on the CPU
        return False, None
    return any(pair[1].grad is not None for name, pair in leaves.items() if EACH in name), None


@torch.no_grad()
def goes_row_by_row(experts: Experts) -> str | None:
    """Why a token's output depends on what else an expert is given, in training as well, or on other calls; None: it does not."""
    count = min(experts.count, _AT_ONCE)
    if _each(experts, False) * count > _COPIED:
        return None
    code = Local(experts.module, (experts.count, count), lists=experts.lists)
    parameters = _equal_experts(experts, count, 4)
    # Some take an expert's weights once for each row.
    rows = _ROWS if _ROWS * _each(experts) <= 4 * _COPIED else _AT_ONCE
    every = torch.randn(rows, experts.features, generator=torch.Generator().manual_seed(5))

    def made(training: bool, *some: Tensor) -> Tensor:
        first = torch.zeros(rows, 1, dtype=torch.int64)
        ones = torch.ones(rows, 1)
        return torch.cat([code(parameters, training, one, first[: len(one)], ones[: len(one)]) for one in some])

    try:
        with torch.random.fork_rng([]):
            for training in (False, True):
                whole = made(training, every)
                drawn = training and not torch.equal(whole, made(training, every))
                if not drawn and not _close(made(training, *every.split(1)), whole):
                    return (
                        "gives a token something else beside other tokens, as where an expert has a capacity or a mean over what it is given; let "
                        "the router drop tokens"
                    )
    except Exception:  # as above
        return "fails in a trial on many tokens of one expert, or on single ones"
    changed = code.changed()
    return changed and (
        f"leaves {changed} behind, which each rank would have of the rows of its own experts alone; leave such numbers to the router, which sees all"
    )


def _close(got: Tensor, expected: Any) -> bool:
    return (
        bool(got.isfinite().all()) and bool((got - expected).norm() <= 1e-4 * expected.norm()) and bool(expected.any())
    )


def splittable(experts: Experts, ranks: int) -> Mapping[str, Cut] | None:
    """Find cuts of each expert's inner features between tensor ranks whose outputs add up; None where there are none."""
    for cuts in _candidates(experts, ranks):
        if _adds_up(experts, cuts, ranks):
            return cuts
    return None


def _candidates(experts: Experts, ranks: int) -> Iterator[dict[str, Cut]]:
    """Splits that may be right: first matrices by their outputs, in one part or two, last ones by their inputs."""
    named = {name: shape for name, shape in experts.shapes.items() if not experts.cuts[name].common}
    for last in _last_ones(named):
        for turned, parts in itertools.product((False, True), (2, 1)):
            cuts = dict(experts.cuts)
            cuts |= {name: _cut(name in last, shape, experts, turned, parts) for name, shape in named.items()}
            fits = all(
                cut.dim is None or named[name][cut.dim] % (cut.parts * ranks) == 0
                for name, cut in cuts.items()
                if name in named
            )
            if fits and any(cut.dim is not None for cut in cuts.values()):
                yield cuts


def _last_ones(named: Collection[str]) -> Iterator[set[str]]:
    """Parameters that may be of experts' last products: by their names, or those of the last layer of experts in a list."""
    yield {name for name in named if _LAST.search(name)}
    layer = next((name.rpartition(".")[0] for name in reversed(list(named)) if EACH in name), None)
    if layer is not None:
        yield {name for name in named if name.rpartition(".")[0] == layer}


def _cut(last: bool, shape: tuple[int, ...], experts: Experts, turned: bool, parts: int) -> Cut:
    if shape[0] != experts.count:  # experts' rows, one expert's after another's
        return Cut(0, experts.count)
    if len(shape) == 1:
        return Cut()
    if len(shape) == 2:
        return Cut(once=True) if last else Cut(1, parts)
    if last:
        return Cut(1 if turned else 2)
    return Cut(2 if turned else 1, parts)


@torch.no_grad()
def _adds_up(experts: Experts, cuts: Mapping[str, Cut], ranks: int) -> bool:
    generator = torch.Generator().manual_seed(1)
    parameters = _draw(experts, 2, generator)
    tokens = torch.randn(_TOKENS, experts.features, generator=generator)
    routes = torch.tensor([[0], [1], [0], [1], [1]]), torch.ones(_TOKENS, 1)
    try:
        whole = Local(experts.module, (experts.count, 2), lists=experts.lists)(parameters, False, tokens, *routes)
        total = torch.zeros_like(whole)
        for rank in range(ranks):
            code = Local(experts.module, (experts.count, 2), ranks, experts.lists)
            total += code({n: _share(p, cuts[n], ranks, rank) for n, p in parameters.items()}, False, tokens, *routes)
        return _close(total, whole)
    except Exception:  # as above
        return False


def _share(tensor: Tensor, cut: Cut, ranks: int, rank: int) -> Tensor:
    if cut.once:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if cut.dim is None:
        return tensor
    # Of rows of experts one after another two are drawn.
    parts = 2 if cut.dim == 0 else cut.parts
    return torch.cat([part.chunk(ranks, cut.dim)[rank] for part in tensor.chunk(parts, cut.dim)], cut.dim)
