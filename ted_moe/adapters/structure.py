"""Experts modules, found by what they do: ``experts(hidden, indices, weights)`` sums the chosen experts' weighted outputs.

Whatever the experts are inside, such a module can be dealt out: of the expert dim of its parameters each rank keeps a part, and runs
the module's own code on the rows that come to it, each for one expert with weight 1. So routers, with their ties, biases, groups and
losses, stay the model's own. That a module does this, and that the shares of a split of its inner features add up to its output, is
not read off names: small copies with random weights are asked.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

_TOLD = re.compile(r"(^|_)experts?(_|$)")
_ROUTING = re.compile(r"per_tok|top_?k|shared|zero|group|first|capacity|bias|hash")
_INNER = re.compile(r"intermediate|ffn|inner|expert_dim")
_LAST = re.compile(r"(^|[._])(down|w2|wo|out|output|fc2|c_proj)(_|$|\.)|down_proj")
_TOKENS = 5


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
    """An experts module.

    Attributes:
        name: in the model.
        module: the experts.
        count: how many there are, E.
        features: of a token, M.
        cuts: by parameter, for experts that are not split.
        refusal: why it is not understood.
        arguments: what its forward calls hidden states, indices and weights.
    """

    name: str
    module: nn.Module
    count: int = 0
    features: int = 0
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    refusal: str | None = None
    arguments: tuple[str, ...] = ()


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Names of the three arguments that a forward has; none where it has another number that must be given."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in named)
    return tuple(p.name for p in named[:3]) if len(named) >= 3 and needed <= 3 else ()


def find(model: nn.Module, apart: Collection[str] = ()) -> dict[str, Experts]:
    """The experts modules of a model by name, also those that are not understood, with the reason.

    A module is one where its class or its name speaks of experts and it holds several of them, or where it is understood. One
    that is not understood, and holds one that is, is what is around experts.

    Args:
        model: the model.
        apart: names of modules that are not looked into.
    """
    found: dict[str, Experts] = {}
    known: dict[Any, Experts] = {}
    for name, module in model.named_modules():
        around = [other for other in found if not other or name.startswith(f"{other}.")]
        inside = any(found[other].refusal is None for other in around)
        inside = inside or any(not other or name == other or name.startswith(f"{other}.") for other in apart)
        holds = any(not name or other.startswith(f"{name}.") for other in apart)
        named = _speaks_of_experts(name, module)
        may_be = named or (_arguments(module) and module._parameters and _count(module) is not None)
        if inside or holds or not may_be or next(module.parameters(), None) is None:
            continue
        like = _likeness(module)
        if like not in known or known[like].refusal is not None:
            known[like] = _understand(name, module)
        if known[like].refusal is None:
            found = {other: one for other, one in found.items() if other not in around}
        if known[like].refusal is None or (named and not around):
            found[name] = replace(known[like], name=name, module=module)
    return found


def _likeness(module: nn.Module) -> Any:
    """Equal for experts that are understood alike: layers of one model."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    numbers = tuple(tuple(sorted(_numbers(one, re.compile("")).items())) for one in module.modules())
    return type(module), shapes, numbers, "forward" in vars(module), any(p.is_meta for p in module.parameters())


def _speaks_of_experts(name: str, module: nn.Module) -> bool:
    several = len(module._modules) != 1 or bool(module._parameters)
    named = name.rpartition(".")[2] == "experts" and not isinstance(module, nn.Linear)
    return (named and several) or type(module).__name__.endswith("Experts")


def _understand(name: str, module: nn.Module) -> Experts:
    kind = type(module).__name__

    def refused(why: str) -> Experts:
        return Experts(name, module, refusal=f"layer {name} ({kind}) {why}")

    arguments = _arguments(module)
    if not arguments:
        return refused(
            "holds experts, but its forward does not take (hidden states, expert indices, weights), so who routes what is not known"
        )
    if "forward" in vars(module):
        return refused("has a forward put on the object itself, which would run with another rank's experts")
    if any(parameter.is_meta for parameter in module.parameters()):
        return refused("is on the meta device; build the model on the CPU or the accelerator")
    count = _count(module)
    if count is None:
        return refused("holds parameters that are not one for each of a number of experts that it names (num_experts)")
    cuts = {each: Cut(common=parameter.dim() < 2) for each, parameter in module.named_parameters()}
    for features in _widths(module, count):
        experts = Experts(name, module, count, features, cuts, arguments=arguments)
        if _sums_its_experts(experts):
            return experts
    return refused("does not give the weighted sum of what it makes of each token by each of its experts alone")


def _count(module: nn.Module) -> int | None:
    """The number of experts: named by an attribute, and that of slices of every parameter but vectors of all."""
    stacks = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    named = {value for one in module.modules() for value in _numbers(one, _TOLD).values()}
    fitting = [value for value in named if value > 1 and stacks and all(p.shape[0] % value == 0 for p in stacks)]
    exact = [value for value in fitting if all(p.shape[0] == value for p in stacks)]
    return max(exact or fitting, default=None)


def _numbers(module: nn.Module, pattern: re.Pattern) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and pattern.search(name) and not _ROUTING.search(name)
    }


def _widths(module: nn.Module, count: int) -> list[int]:
    """Candidates for the number of features of a token, the likeliest first."""
    named = [
        getattr(module, name) for name in ("hidden_dim", "hidden_size") if isinstance(getattr(module, name, None), int)
    ]
    stacks = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    return list(dict.fromkeys([*named, *sorted(size for p in stacks for size in p.shape[1:])]))


class Local:
    """A module's own code with parameters that are given in each call: those of some of its experts, or shares of them.

    Args:
        module: the experts, before they are split.
        count: how many the module has, and how many are given here.
        inner: by what its inner features are divided.
    """

    def __init__(self, module: nn.Module, count: tuple[int, int], inner: int = 1) -> None:
        self._holders: dict[str, nn.Module] = {}
        self._code = self._copy(module, "", count, inner)

    def _copy(self, module: nn.Module, name: str, count: tuple[int, int], inner: int) -> nn.Module:
        made = copy.copy(module)
        made._parameters = {}
        made._modules = {
            key: child
            if child is None or next(child.parameters(), None) is None
            else self._copy(child, f"{name}{key}.", count, inner)
            for key, child in module._modules.items()
        }
        whole, here = count
        vars(made).update({key: here for key, value in _numbers(module, _TOLD).items() if value == whole})
        vars(made).update({key: value // inner for key, value in _numbers(module, _INNER).items()})
        self._holders[name] = made
        return made

    def __call__(self, parameters: Mapping[str, Tensor], training: bool, *arguments: Tensor) -> Tensor:
        """Run the module on (hidden, indices, weights) with other parameters, and return its output."""
        try:
            for name, tensor in parameters.items():
                holder, _, own = name.rpartition(".")
                self._holders[f"{holder}." if holder else ""]._parameters[own] = tensor  # type: ignore[assignment]
            for holder_ in self._holders.values():
                holder_.training = training
            return self._code.forward(*arguments)
        finally:
            for holder_ in self._holders.values():
                holder_._parameters = {}


def _draw(experts: Experts, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random parameters of so many experts."""
    drawn = {}
    for name, parameter in experts.module.named_parameters():
        shape = list(parameter.shape)
        if not experts.cuts[name].common:
            shape[0] = shape[0] // experts.count * count
        drawn[name] = torch.randn(shape, generator=generator) / max(shape[-1], 1) ** 0.5
    return drawn


@torch.no_grad()
def _sums_its_experts(experts: Experts) -> bool:
    """True if a small copy gives, of tokens with two experts each, the weighted sum of its outputs with one."""
    generator = torch.Generator().manual_seed(0)
    parameters = _draw(experts, 2, generator)
    code = Local(experts.module, (experts.count, 2))
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
    named = {name: p for name, p in experts.module.named_parameters() if not experts.cuts[name].common}
    for turned in (False, True):
        for parts in (2, 1):
            cuts = dict(experts.cuts)
            cuts |= {name: _cut(name, tuple(p.shape), experts, turned, parts) for name, p in named.items()}
            fits = all(
                cut.dim is None or named[name].shape[cut.dim] % (cut.parts * ranks) == 0
                for name, cut in cuts.items()
                if name in named
            )
            if fits and any(cut.dim is not None for cut in cuts.values()):
                yield cuts


def _cut(name: str, shape: tuple[int, ...], experts: Experts, turned: bool, parts: int) -> Cut:
    last = _LAST.search(name) is not None
    if shape[0] != experts.count:  # experts' rows, one expert's after another's
        return Cut(0, experts.count)
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
        whole = Local(experts.module, (experts.count, 2))(parameters, False, tokens, *routes)
        total = torch.zeros_like(whole)
        for rank in range(ranks):
            code = Local(experts.module, (experts.count, 2), ranks)
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
