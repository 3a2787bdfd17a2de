"""Experts modules, found by what they do: ``experts(hidden, indices, weights)`` sums the chosen experts' weighted outputs.

Whatever the experts are inside, such a module can be dealt out: of the expert dim of its parameters each rank keeps a part, and runs
the module's own code on the rows that come to it, each for one expert with weight 1. So routers, with their ties, biases, groups and
losses, stay the model's own. That a module does this, and that the shares of a split of its inner features add up to its output, is
not read off names: small copies with random weights are asked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ted_moe.adapters.lists import EACH, alike, lists_in, numbered, problem_of, stacks
from ted_moe.adapters.local import TOLD, numbers_of
from ted_moe.adapters.trials import Cut, Experts, differentiated, goes_by_weights, goes_row_by_row, sums_its_experts


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
        may_be = named or (_arguments(module) and _may_hold_experts(module))
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


def _may_hold_experts(module: nn.Module) -> bool:
    """True if a module whose name says nothing has stacks, is a list, or has one of as many as it says that it has experts."""
    if module._parameters:
        return _count(module) is not None
    lists = [listed for prefix, listed in lists_in(module).items() if prefix.count(".") < 2]
    told = numbers_of(module, TOLD).values()
    return any(listed is module or len(numbered(listed)) in told for listed in lists)


def _likeness(module: nn.Module) -> Any:
    """Equal for experts that are understood alike: layers of one model."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    numbers = tuple(tuple(sorted(numbers_of(one, re.compile("")).items())) for one in module.modules())
    kinds = tuple(type(one) for one in module.modules())
    return kinds, shapes, numbers, "forward" in vars(module), any(p.is_meta for p in module.parameters())


def _speaks_of_experts(name: str, module: nn.Module) -> bool:
    several = len(module._modules) != 1 or bool(module._parameters)
    several = several or any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.children())
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
    lists = lists_in(module)
    problem = problem_of(lists)
    if problem is not None:
        return refused(problem)
    shapes, count = stacks(module, lists), _count(module)
    if count is None:
        return refused(
            "holds parameters that are neither one for each of a number of experts that it names (num_experts) nor in an nn.ModuleList of "
            "experts alike"
        )
    summed = False
    for cuts in _whole(shapes, count, bool(lists)):
        for features in _widths(module, shapes):
            experts = Experts(name, module, count, features, cuts, shapes, tuple(lists), arguments=arguments)
            if sums_its_experts(experts):
                summed = True
                if goes_by_weights(experts):
                    reason = goes_row_by_row(experts)
                    every, reason = (False, reason) if reason is not None else differentiated(experts)
                    return replace(experts, calls_every=every) if reason is None else refused(reason)
    if summed:
        return refused(
            f"computes something else for equal weights by the number of the expert, as by a buffer, a list or its parity, and another rank's "
            f"experts have other numbers; have all that differs between experts in parameters whose first dim is {count}"
        )
    named = next(
        (one for one, child in module.named_modules() if isinstance(child, nn.ModuleDict) and alike(child)), None
    )
    if named is not None:
        return refused(
            f"has modules alike in the nn.ModuleDict {named}, whose keys are no experts' numbers; put experts in an nn.ModuleList"
        )
    return refused("does not give the weighted sum of what it makes of each token by each of its experts alone")


def _whole(shapes: Mapping[str, tuple[int, ...]], count: int, listed: bool) -> Iterator[dict[str, Cut]]:
    """Cuts for experts that are not split, of which vectors are all experts', or those as long as there are experts a number for each.

    Beside lists matrices are all experts', too, but stacks of them.
    """

    def common(name: str, shape: tuple[int, ...]) -> bool:
        return EACH not in name and (len(shape) < 2 or (listed and shape[0] != count))

    yield {name: Cut(common=common(name, shape)) for name, shape in shapes.items()}
    numbers = {name for name, shape in shapes.items() if shape == (count,)}
    if numbers:
        yield {name: Cut(common=common(name, shape) and name not in numbers) for name, shape in shapes.items()}


def _count(module: nn.Module) -> int | None:
    """The number of experts: as many as lists have, or named by an attribute, and that of slices of every parameter but vectors of all."""
    lists = lists_in(module)
    if lists:
        return len(numbered(next(iter(lists.values()))))
    stacks = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    named = {value for one in module.modules() for value in numbers_of(one, TOLD).values()}
    fitting = [value for value in named if value > 1 and stacks and all(p.shape[0] % value == 0 for p in stacks)]
    exact = [value for value in fitting if all(p.shape[0] == value for p in stacks)]
    return max(exact or fitting, default=None)


def _widths(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Candidates for the number of features of a token, the likeliest first."""
    named = [
        getattr(module, name) for name in ("hidden_dim", "hidden_size") if isinstance(getattr(module, name, None), int)
    ]
    return list(dict.fromkeys([*named, *sorted(size for shape in shapes.values() for size in shape[1:])]))
